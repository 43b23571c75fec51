"""Time and peak memory of callables."""
import ctypes
import gc
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, NamedTuple, Optional

import numpy as np
import torch
from tqdm import tqdm

from acmix_det.ops.checks import check_positive_int

MIN_REPEATS = 3
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt


class Timing(NamedTuple):
    """Times of one case in ms.

    Attributes:
        median (float): Median of all repetitions.
        lower (float): First quartile.
        upper (float): Third quartile.
        repeats (int): Number of repetitions.
    """
    median: float
    lower: float
    upper: float
    repeats: int


class Memory(NamedTuple):
    """Memory of one run in bytes, beyond what was there before it.

    Attributes:
        peak (int): The most at any moment, results included.
        results (int): Size of what the run returned: outputs and gradients.
    """
    peak: int
    results: int

    @property
    def extra(self) -> int:
        """Peak less results.

        Where the peak comes before all of the results exist, it is too small,
        by no more than their size.
        """
        return max(self.peak - self.results, 0)


def measure(cases: Dict[Hashable, Callable[[], Any]],
            repeats: int = 20,
            warmup: int = 2,
            seconds: float = math.inf,
            device: str = 'cpu') -> Dict[Hashable, Timing]:
    """Time callables in turns.

    Each round runs every case once, so that a machine that slows down does it
    to all of them. The device is idle at both ends of a measured time.

    Args:
        cases (dict[Hashable, Callable]): Key to what is timed. The progress
            bar shows the key.
        repeats (int): Rounds. Defaults to 20.
        warmup (int): Runs of every case before the first round. Defaults to 2.
        seconds (float): A case that has used this time leaves the rounds, but
            not before 3 repetitions; its warm-up ends as well. Defaults to no
            limit.
        device (str): Device of the cases. Defaults to 'cpu'.

    Returns:
        dict[Hashable, Timing]: Key to its times.

    Raises:
        TypeError: If ``repeats`` is no int.
        ValueError: If ``repeats`` is not positive or ``warmup`` is negative.

    Example:
        >>> from acmix_det.evaluation.benchmark import measure
        >>> measure({'sum': lambda: sum(range(100))}, repeats=5)['sum'].repeats
        5
    """
    check_positive_int('repeats', repeats)
    if warmup < 0:
        raise ValueError(f'warmup must not be negative, got {warmup}')
    times: Dict[Hashable, List[float]] = {key: [] for key in cases}
    tty = sys.stderr.isatty()
    with tqdm(total=repeats * len(cases), unit='run', leave=False,
              dynamic_ncols=True, mininterval=0.5 if tty else 15) as bar:
        for key, case in cases.items():
            bar.set_description(f'{_label(key)}, warm-up', refresh=tty)
            used = 0.
            for _ in range(warmup):
                used += _time(case, device)
                if used > seconds:
                    break
        for turn in range(repeats):
            for key, case in cases.items():
                if turn >= MIN_REPEATS and sum(times[key]) > seconds:
                    bar.total -= 1
                    continue
                bar.set_description(_label(key), refresh=tty)
                times[key].append(_time(case, device))
                bar.update()
    return {
        key: Timing(*(1e3 * np.percentile(x, [50, 25, 75])).tolist(), len(x))
        for key, x in times.items()
    }


def _label(key: Hashable) -> str:
    return ', '.join(map(str, key)) if isinstance(key, tuple) else str(key)


def _time(case: Callable[[], Any], device: str) -> float:
    cuda = torch.device(device).type == 'cuda'
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    results = case()
    if cuda:
        torch.cuda.synchronize(device)
    used = time.perf_counter() - start
    del results  # freed when the clock has stopped
    return used


def in_fresh_process(function: Callable,
                     *args,
                     timeout: Optional[float] = None) -> Any:
    """Return what a function returns in a new Python process.

    Args:
        function (Callable): A function of a module's top level.
        *args: Its arguments; they are pickled, as is the result.
        timeout (float | None): Seconds until the process is ended. Defaults
            to None, no limit.

    Raises:
        RuntimeError: If the function raises, or the process ends without a
            result, or not in time.
    """
    context = multiprocessing.get_context('spawn')
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise RuntimeError(f'no result within {timeout:g} s')
        error, result = receiver.recv()
        process.join(10)
    except EOFError:
        process.join()
        raise RuntimeError('its process ended without a result (exit code '
                           f'{process.exitcode})') from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if error is not None:
        raise RuntimeError(error)
    return result


def _send(sender, function: Callable, args: tuple) -> None:
    try:
        message = None, function(*args)
    except Exception as error:  # told to the parent, whatever it is
        message = summary(error), None
    sender.send(message)


def summary(error: BaseException) -> str:
    """One line that says what an exception is about."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    name = type(error).__name__
    return f'{name}: {lines[0]}' if lines else name


def peak_memory(prepare: Callable,
                *args,
                device: str = 'cpu',
                threads: Optional[int] = None) -> Optional[Memory]:
    """Measure the peak memory of one run in a process of its own.

    On CUDA it is what PyTorch's allocator hands out. On Linux it is the
    resident set of the process (VmHWM); freed blocks go back to the system at
    once, so that those of the preparation do not hide those of the run.

    Args:
        prepare (Callable): A function of a module's top level. It makes the
            inputs and returns two callables: a warm-up, for which a small
            input will do, and the run, which returns the tensors that it is
            there for (outputs, gradients).
        *args: Its arguments, which are pickled.
        device (str): Device of the run. Defaults to 'cpu'.
        threads (int | None): Threads of PyTorch. Defaults to None, its own
            choice.

    Returns:
        Memory | None: None on a system that does not tell.

    Raises:
        RuntimeError: If the run fails.
    """
    return in_fresh_process(_peak_memory, prepare, args, device, threads)


def _peak_memory(prepare, args, device, threads) -> Optional[Memory]:
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        trim = libc.malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc

        def trim(_):
            return 0

    if threads is not None:
        torch.set_num_threads(threads)
    warm_up, run = prepare(*args)
    warm_up()
    del warm_up
    gc.collect()
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        trim(0)
        before = _reset_resident_peak()
        if before is None:
            return None
        results = run()
        peak = _resident('VmHWM')
    return Memory(peak - before, sum(x.nbytes for x in results))


def _reset_resident_peak() -> Optional[int]:
    """Set the peak to the present size and return it, None if impossible."""
    try:
        Path('/proc/self/clear_refs').write_text('5')
        return _resident('VmRSS')
    except (OSError, KeyError):
        return None


def _resident(field: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    fields = dict(line.split(':', 1) for line in lines)
    return int(fields[field].split()[0]) * 1024
