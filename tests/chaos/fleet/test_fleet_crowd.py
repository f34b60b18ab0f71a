"""A thousand engines on four servers: what each costs a server, and that nothing grows."""

import pytest
from fleet_soak import Load, grown, soak


@pytest.mark.whole
@pytest.mark.timeout(480)
def test_a_thousand_engines_cost_each_server_little_and_nothing_grows(tmp_path):
    """For a minute; `make fleet-soak` goes on for longer."""
    load = Load(24, 2.5, 150, 10)
    result = soak(tmp_path, load)
    print(result)
    result.check()
    assert result.replaced >= 0.7 * load.parts * load.part_s * load.engines_replaced_a_second
    assert result.asked >= 0.9 * load.parts * load.part_s * load.lookups_a_second


def test_growth_is_measured_between_the_second_quarter_and_the_last():
    assert grown([1, 1, 100, 100, 7, 7, 110, 110]) == pytest.approx(0.1)
    assert grown([5, 1, 100, 100, 7, 7, 90, 110]) == 0.0
