"""The mover: bytes are copied, hashed, read and written by threads outside of the interpreter."""
