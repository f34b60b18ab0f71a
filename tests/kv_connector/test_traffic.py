"""The minute line reports where prompt tokens came from, and only what is new."""

from kv_connector import metrics
from kv_connector.metrics import Traffic


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_line_adds_up_to_the_prompt_tokens():
    clock = Clock()
    traffic = Traffic(60, clock)
    traffic.looked_up("a", 1000, 0)
    traffic.looked_up("a", 1000, 100)  # asked again before it was admitted
    traffic.admitted({"host": 300, "external_unspecified": 200})
    totals = {(metrics.PUT_BLOCKS, "created"): 4, (metrics.DECLINED_BLOCKS, "pinned_rows"): 2}
    assert traffic.line(totals) is None
    clock.now = 61
    assert traffic.line(totals) == (
        "1 requests, 1000 prompt tokens: engine 100, CPU pool 300, server 200, computed 400; "
        "put created 4; missed nothing; declined pinned_rows 2"
    )
    clock.now = 122
    assert traffic.line(totals) is None, "nothing new, no line"
    traffic.looked_up("b", 10, 0)
    clock.now = 190
    assert traffic.line(totals) == (
        "1 requests, 10 prompt tokens: engine 0, computed 10; put nothing; missed nothing; "
        "declined nothing"
    )
