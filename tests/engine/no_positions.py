"""A vLLM whose requests do not record where their keys are, for the engine of a test."""

from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kv_connector.connector import KVFerryConnector

made = ReqContext.__init__


def without_record(self: ReqContext, *args: Any, **named: Any) -> None:
    made(self, *args, **named)
    self.__dict__["ends"] = self.__dict__.pop("_offload_key_positions")


def record(self: ReqContext, key: OffloadKey, end_token: int) -> None:
    self.__dict__["ends"][key] = end_token


def recorded(self: ReqContext, key: OffloadKey) -> int | None:
    end: int | None = self.__dict__["ends"].get(key)
    return end


ReqContext.__init__ = without_record  # type: ignore[method-assign]
ReqContext.set_offload_key_position = record  # type: ignore[method-assign]
ReqContext.get_offload_key_position = recorded  # type: ignore[method-assign]


class NoPositions(KVFerryConnector):
    """Our connector in that vLLM."""
