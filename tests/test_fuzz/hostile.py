"""What the fuzzers share: hostile values, and the number of examples.

    python -m pytest tests/test_fuzz                            # a minute
    python -m pytest tests/test_fuzz --hypothesis-profile long  # an hour

The first takes the same examples everywhere; the second fifty times as many,
others every time, and it prints how to repeat a failure. ``ulimit -v 14000000``
before it turns a huge allocation into an error.
"""
from hypothesis import settings

HOSTILE = (None, 0, -1, 2, 3, 2**31, 2**31 + 1, 2**63, 2**63 + 1, 10**400,
           1.5, -0.5, 1e300, float('nan'), float('inf'), '', '3', 'x', b'3',
           [], [3], [None], (3, 3, 3), ('x', ), True, False, object(), {},
           {'type': 'x'}, {'x': 1})


def examples(count):
    """Settings of a test: ``count`` examples, multiplied by the profile."""
    return settings(max_examples=count * settings.default.max_examples // 100)


def assert_names_one_of(error, bad):
    """The message holds the name and value of one of the bad arguments."""
    text = str(error)
    assert any(
        name in text and any(
            shown in text for shown in (f'{value}', f'{value!r}'))
        for name, value in bad.items()), f'{error!r} does not name {bad}'


def innermost(error):
    """The file that raised an error, behind mmengine's wrappers."""
    while True:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        file = trace.tb_frame.f_code.co_filename
        if 'build_functions' not in file or error.__context__ is None:
            return file
        error = error.__context__
