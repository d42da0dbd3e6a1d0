"""Lines on how far a run is."""

from dflash_local.bench.measure.single import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_told_now_and_then() -> None:
    told: list[str] = []
    clock = Clock()
    pace = Pace(told.append, clock)
    pace.start(40, work=80.0)
    for _ in range(12):
        clock.now += 1
        pace.count(2.0)
    assert told == ["10 of 40 answers, about 30 s left"]
    for _ in range(28):
        clock.now += 60
        pace.count(2.0)
    assert told[1] == "13 of 40 answers, about 2 min left"
    clock.now += 1000
    assert Pace(told.append, clock).left == "about 1 s left"  # nothing is known yet
    assert "40 of 40" not in told[-1]
