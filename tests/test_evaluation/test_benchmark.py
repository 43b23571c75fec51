"""Measuring core of the benchmarks, on fake cases and known allocations."""
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from acmix_det.evaluation import backend_check, benchmark, benchmark_peers
from acmix_det.evaluation import benchmark_report as report
from acmix_det.evaluation.backend_check import CASES, backend_errors
from acmix_det.evaluation.benchmark import (MIN_REPEATS, Memory, Timing,
                                            in_fresh_process, measure,
                                            peak_memory)
from acmix_det.ops import local_attention, torch_backend

MB = 10**6


class Clock:
    """A clock that only cases move."""

    def __init__(self, monkeypatch):
        self.now = 0.
        self.calls = []
        monkeypatch.setattr(time, 'perf_counter', lambda: self.now)

    def case(self, name, *seconds):
        """A case that takes these times, the last one ever after."""
        left = list(seconds)

        def run():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_cases_take_turns_after_the_warm_up(clock):
    times = measure({n: clock.case(n, 1.) for n in 'abc'}, repeats=3, warmup=2)
    assert ''.join(clock.calls) == 'aabbcc' + 'abc' * 3
    assert [t.repeats for t in times.values()] == [3, 3, 3]


def test_median_and_quartiles_are_in_ms_and_without_the_warm_up(clock):
    case = clock.case('a', 100., .004, .001, .005, .002, .003)
    timing = measure({'a': case}, repeats=5, warmup=1)['a']
    assert timing == pytest.approx((3., 2., 4., 5))


def test_slow_case_leaves_the_rounds_after_its_time(clock):
    times = measure(
        dict(slow=clock.case('s', 6.), mid=clock.case('m', 2.),
             fast=clock.case('f', .1)), repeats=8, warmup=4, seconds=9.)
    assert MIN_REPEATS == 3
    assert {k: t.repeats for k, t in times.items()} == dict(
        slow=3, mid=5, fast=8)
    # its warm-up ended after the second run, which went over the time
    assert ''.join(clock.calls).startswith('ssmmmmffffsmfsmfsmfmfmff')


def test_numbers_of_runs_are_checked():
    with pytest.raises(ValueError, match='repeats must be positive, got 0'):
        measure({}, repeats=0)
    with pytest.raises(ValueError, match='warmup must not be .*, got -1'):
        measure({}, warmup=-1)


def prepare_known(warm_up_mb, needed_mb, result_mb):
    threads = []

    def warm_up():
        threads.append(torch.get_num_threads())
        torch.ones(warm_up_mb * MB, dtype=torch.uint8)

    def run():
        needed = torch.ones(needed_mb * MB, dtype=torch.uint8)
        result = torch.ones(result_mb * MB, dtype=torch.uint8)
        del needed
        return [result, *torch.empty(*threads, dtype=torch.uint8)]

    return warm_up, run


# One process, since each takes seconds to start.
@pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc')
def test_known_allocation_is_seen_also_after_a_larger_warm_up():
    found = peak_memory(prepare_known, 80, 50, 10, threads=3)
    assert found.results == 10 * MB + 3  # a byte for each thread
    assert 59 * MB < found.peak < 64 * MB
    assert found.extra == found.peak - found.results


def test_extra_is_never_negative():
    assert Memory(peak=5, results=7).extra == 0


@pytest.mark.parametrize('error', [OSError, KeyError])
def test_system_that_does_not_tell_is_none(error, monkeypatch):

    def fail(*args):
        raise error

    monkeypatch.setattr(Path, 'write_text', fail)
    assert benchmark._reset_resident_peak() is None


def fail():
    raise ValueError('\nno luck\ntoday')


def die():
    os._exit(3)


def sleep():
    time.sleep(60)


@pytest.mark.parametrize('function, timeout, message', [
    (die, None, r'^its process ended without a result \(exit code 3\)$'),
    (sleep, .5, '^no result within 0.5 s$'),
])
def test_failing_process_is_one_line(function, timeout, message):
    with pytest.raises(RuntimeError, match=message):
        in_fresh_process(function, timeout=timeout)


ROWS = [
    report.Row('base', {'fwd': Timing(2., 1.5, 2.5, 9)},
               {'fwd': Memory(4 * 2**20, 2**20)}),
    report.Row('other', {'fwd': Timing(3., 2., 4., 5),
                         'back': Timing(1234.5, 1200., 1300., 3)},
               {'fwd': Memory(2 * 2**20, 2**21)}),
]


def test_ratios_are_to_the_first_row():
    base, other = report.as_dicts(ROWS)
    assert base['passes']['fwd']['time_ratio'] == 1
    assert other['passes']['fwd'] == dict(
        median_ms=3., lower_quartile_ms=2., upper_quartile_ms=4., repeats=5,
        time_ratio=1.5, peak_mib=2., extra_mib=0., peak_ratio=.5)
    assert other['passes']['back']['time_ratio'] is None


def test_table_shows_what_was_measured_and_dashes():
    lines = report.show_rows('subject', ROWS, memory=True).splitlines()
    cells = [[x.strip() for x in line.strip('|').split('|')]
             for line in lines]
    assert cells[0][:8] == ['subject', 'fwd (ms)', 'quartiles', 'runs',
                            'ratio', 'peak (MiB)', 'ratio', 'extra (MiB)']
    assert cells[2] == ['base', '2.00', '1.50 to 2.50', '9', '1.00', '4.00',
                        '1.00', '3.00', '-', '-', '-', '-', '-', '-', '-']
    assert cells[3][8:] == ['1234', '1200 to 1300', '3', '-', '-', '-', '-']
    assert len({len(line) for line in lines}) == 1
    assert 'MiB' not in report.show_rows('subject', ROWS)


@pytest.mark.parametrize('value, text', [
    (None, '-'), (0, '0'), (123456., '123456'), (12.345, '12.3'),
    (.0012345, '0.00123')
])
def test_numbers_have_three_digits(value, text):
    assert report.number(value) == text


def make_sum(memory_error):
    if memory_error:
        raise torch.OutOfMemoryError('too large')
    return lambda: [torch.ones(3).sum()]


def prepare_sum(memory_error):
    return make_sum(False), fail


def test_row_without_memory_is_a_note():
    args = type('Args', (), dict(repeats=2, seconds=1, device='cpu',
                                 threads=None, memory=True))
    rows, notes = report.run_rows(
        make_sum, prepare_sum, {('good', 'x'): (False, ),
                                ('large', 'x'): (True, )}, args)
    assert [row.name for row in rows] == ['good']
    assert rows[0].times['x'].repeats == 2 and rows[0].memory == {}
    assert notes == ['large, x: cannot run, OutOfMemoryError: too large',
                     'good, x: memory not measured, ValueError: no luck']


def test_environment_names_versions_and_machine():
    found = report.environment()
    assert found['torch'] == torch.__version__
    assert found['threads'] == torch.get_num_threads()
    text = report.header(found)
    assert all(str(x) in text for x in found.values())


def test_every_backend_of_this_machine_is_right():
    errors, notes = backend_errors('cpu')
    assert {e.backend for e in errors} >= {'torch'}
    for e in errors:
        assert e.right, e
        assert e.cases == len(CASES) // (1 if e.dtype == 'float32' else 2)
        # of the type's rounding, and of nothing worse
        assert 0 < e.output < e.tolerance / 10
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize('name, change', [
    ('local_attention', 1e-3), ('local_attention', float('nan')),
    ('local_attention_backward', 1e-3),
])
def test_wrong_backend_is_found(name, change, monkeypatch):
    monkeypatch.setattr(backend_check, 'CASES', CASES[:2])
    original = getattr(torch_backend, name)

    def wrong(*args):
        results = original(*args)
        x = results if name == 'local_attention' else results[1]
        x[..., -1] += change
        return results

    monkeypatch.setattr(torch_backend, name, wrong)
    errors = backend_errors('cpu')[0]
    assert not next(e for e in errors if e.backend == 'torch').right
    assert all(e.right for e in errors if e.backend == 'cpu')


@pytest.mark.filterwarnings('ignore:flex_attention called without')
@pytest.mark.parametrize('height, width, kernel', [(5, 9, 3), (12, 7, 5),
                                                   (3, 40, 7), (1, 1, 7)])
def test_mask_of_flex_attention_is_the_neighborhood(height, width, kernel):
    block, pixels = 8, height * width
    mask = benchmark_peers.neighborhood_mask(height, width, kernel, 'cpu',
                                             block)
    index = torch.arange(pixels)
    y, x = index // width, index % width
    near = (((y[:, None] - y).abs() <= kernel // 2) &
            ((x[:, None] - x).abs() <= kernel // 2))
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index), near)
    blocks = mask.to_dense()[0, 0].bool()
    query, key = near.nonzero().T // block
    assert blocks[query, key].all()
    if pixels > 80:
        assert not blocks.all()

    query, key, value = torch.randn(3, 1, 2, pixels, 4, dtype=torch.double)
    eager = flex_attention(query, key, value, block_mask=mask, scale=1.)

    def to_map(x):
        return x.transpose(2, 3).unflatten(3, (height, width))

    torch.testing.assert_close(
        to_map(eager),
        local_attention(to_map(query), to_map(key), to_map(value), kernel,
                        backend='reference'))
