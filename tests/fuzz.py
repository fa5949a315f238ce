"""Properties on random cases: as many as the command line asks for, in the seconds it gives."""

import time
import zlib

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SETTINGS = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
#: Cases between two looks at the clock.
BATCH = 100


def run_cases(case, request, record_property):
    """Run ``case(data)`` at least ``--fuzz-examples`` times and record how often it passed.

    With ``--fuzz-seconds`` a failure is not made smaller, which takes minutes, and fewer cases do.
    A case that an engine does not serve is drawn again.
    """
    examples = request.config.getoption("--fuzz-examples")
    seconds = request.config.getoption("--fuzz-seconds")
    end = time.monotonic() + (float("inf") if seconds is None else seconds)
    phases = tuple(Phase) if seconds is None else (Phase.generate,)
    ran = 0

    def count(data):
        nonlocal ran
        case(data)
        ran += 1

    first_seed = zlib.crc32(request.node.name.encode())
    try:
        for start in range(0, examples, BATCH):
            limits = settings(SETTINGS, max_examples=min(BATCH, examples - start), phases=phases)
            seed(first_seed + start)(limits(given(data=st.data())(count)))()
            if time.monotonic() > end:
                break
        else:
            assert ran >= examples
    finally:
        record_property("cases", ran)
    assert ran > 0
