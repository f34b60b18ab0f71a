from deployment_fixtures import installed, serving, wheel

__all__ = ["installed", "serving", "wheel"]
