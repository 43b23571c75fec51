"""What benchmarks have in common: options, rows, machine, tables, JSON."""
import json
import math
import platform
from pathlib import Path
from typing import (Any, Callable, Dict, List, NamedTuple, Optional, Sequence,
                    Tuple)

import mmdet
import torch

from acmix_det.ops import cpu_backend
from acmix_det.version import __version__
from .benchmark import (MIN_REPEATS, Memory, Timing, measure, peak_memory,
                        summary)
from .markdown import markdown_table

MIB = 2**20


def environment(device: str = 'cpu') -> Dict[str, Any]:
    """Versions and machine, as plain types."""
    kernels = cpu_backend.can_use(torch.empty(0))
    found = {
        'acmix_det': __version__,
        'torch': torch.__version__,
        'mmdet': mmdet.__version__,
        'python': platform.python_version(),
        'system': platform.platform(),
        'cpu': _cpu_model(),
        'cpu_capability': torch.backends.cpu.get_cpu_capability(),
        'cpu_kernels': kernels or cpu_backend.capability(),
        'threads': torch.get_num_threads(),
        'device': device,
    }
    if torch.device(device).type == 'cuda':
        found['device'] = torch.cuda.get_device_name(device)
        found['cuda'] = torch.version.cuda or torch.version.hip
    return found


def _cpu_model() -> str:
    try:
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.split(':', 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class Row(NamedTuple):
    """Measurements of one subject by pass, such as 'forward'.

    What could not be measured is not in the dictionaries.
    """
    name: str
    times: Dict[str, Timing]
    memory: Dict[str, Memory] = {}


def run_rows(make_run: Callable, prepare: Callable,
             arguments: Dict[Tuple[str, str], tuple],
             args) -> Tuple[List[Row], List[str]]:
    """Measure as the options of :func:`add_options` say.

    Args:
        make_run (Callable): Makes what is timed.
        prepare (Callable): The same for :func:`peak_memory`.
        arguments (dict[tuple[str, str], tuple]): (row, pass) to the arguments
            of both.
        args (Namespace): The options.

    Returns:
        tuple[list[Row], list[str]]: Rows, and why something is not in them.
    """
    cases, memory, notes = {}, {}, []
    for (name, title), values in arguments.items():
        try:
            case = make_run(*values)
            case()
            cases[name, title] = case
        except torch.OutOfMemoryError as error:
            notes.append(f'{name}, {title}: cannot run, {summary(error)}')
    times = measure(cases, args.repeats, warmup=1, seconds=args.seconds,
                    device=args.device)
    case = None
    cases.clear()  # what follows needs the memory
    for name, title in times if args.memory else ():
        try:
            found = peak_memory(prepare, *arguments[name, title],
                                device=args.device, threads=args.threads)
        except RuntimeError as error:
            notes.append(f'{name}, {title}: memory not measured, {error}')
            continue
        if found is None:
            notes.append('memory: not measured, this system does not tell')
            break
        memory[name, title] = found
    names = dict.fromkeys(name for name, _ in times)

    def of(values, name):
        return {title: x for (n, title), x in values.items() if n == name}

    return [Row(n, of(times, n), of(memory, n)) for n in names], notes


def as_dicts(rows: Sequence[Row]) -> List[Dict[str, Any]]:
    """Rows as plain types; ratios are to the first row."""

    def ratio(value, name, pick):
        base = pick(rows[0]).get(name)
        return value[0] / base[0] if base and base[0] else None

    found = []
    for row in rows:
        passes: Dict[str, dict] = {
            name: dict(median_ms=t.median, lower_quartile_ms=t.lower,
                       upper_quartile_ms=t.upper, repeats=t.repeats,
                       time_ratio=ratio(t, name, lambda r: r.times))
            for name, t in row.times.items()
        }
        for name, m in row.memory.items():
            passes.setdefault(name, {}).update(
                peak_mib=m.peak / MIB, extra_mib=m.extra / MIB,
                peak_ratio=ratio(m, name, lambda r: r.memory))
        found.append(dict(name=row.name, passes=passes))
    return found


def show_rows(title: str, rows: Sequence[Row], memory: bool = False) -> str:
    """Markdown table of rows: medians, quartiles and ratios to the first."""
    dicts = as_dicts(rows)
    names = list(dict.fromkeys(x for row in dicts for x in row['passes']))
    header = [title]
    for name in names:
        header += [f'{name} (ms)', 'quartiles', 'runs', 'ratio']
        if memory:
            header += ['peak (MiB)', 'ratio', 'extra (MiB)']
    cells = []
    for row in dicts:
        cells.append([row['name']])
        for name in names:
            x = row['passes'].get(name, {})
            quartiles = '-'
            if 'median_ms' in x:
                quartiles = (f'{number(x["lower_quartile_ms"])} to '
                             f'{number(x["upper_quartile_ms"])}')
            cells[-1] += [number(x.get('median_ms')), quartiles,
                          x.get('repeats', '-'), number(x.get('time_ratio'))]
            if memory:
                cells[-1] += [number(x.get('peak_mib')),
                              number(x.get('peak_ratio')),
                              number(x.get('extra_mib'))]
    return markdown_table(header, cells)


def number(value: Optional[float]) -> str:
    """Three significant digits, no exponent; '-' where there is none."""
    if value is None:
        return '-'
    if value == 0:
        return '0'
    return f'{value:.{max(2 - math.floor(math.log10(abs(value))), 0)}f}'


def add_options(parser, repeats: int, seconds: float) -> None:
    """Add the command-line options that all benchmarks have."""
    parser.add_argument('--batch-size', type=int, default=1,
                        help='default: %(default)s')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu',
                        help='default: %(default)s')
    parser.add_argument('--threads', type=int,
                        help="CPU threads (default: PyTorch's choice)")
    parser.add_argument('--repeats', type=int, default=repeats,
                        help='repetitions of every row (default: %(default)s)')
    parser.add_argument('--seconds', type=float, default=seconds,
                        help='a row and pass that has used this time is not '
                        f'repeated any more after {MIN_REPEATS} repetitions '
                        '(default: %(default)s)')
    parser.add_argument('--memory', action='store_true',
                        help='measure peak memory too, each row and pass in '
                        'a process of its own')
    parser.add_argument('--json', type=Path, metavar='FILE',
                        help='write the results with all digits')


def check_options(parser, args) -> None:
    """End with a message if an option of :func:`add_options` is wrong."""
    for name in ('batch_size', 'threads', 'repeats', 'seconds'):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f'--{name.replace("_", "-")} must be positive, got '
                         f'{value}')
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device must be cpu where PyTorch finds no CUDA '
                     'device, got cuda')
    if args.json is not None and not args.json.parent.is_dir():
        parser.error('--json must be in a folder that exists, got '
                     f'{args.json}')
    if args.threads is not None:
        torch.set_num_threads(args.threads)


def header(found: Dict[str, Any]) -> str:
    """Lines that name versions and machine."""
    gpu = f', CUDA {found["cuda"]}' if 'cuda' in found else ''
    return (f'acmix_det {found["acmix_det"]}, torch {found["torch"]}, mmdet '
            f'{found["mmdet"]}, Python {found["python"]}, {found["system"]}\n'
            f'{found["cpu"]} ({found["cpu_capability"]}; kernels of '
            f'acmix_det: {found["cpu_kernels"]}), {found["threads"]} '
            f'threads\ndevice: {found["device"]}{gpu}')


def write_json(path: Path, found: Dict[str, Any], args,
               tables: Sequence[Dict[str, Any]]) -> None:
    """Write a benchmark: environment, arguments, tables."""
    path.write_text(
        json.dumps(
            dict(environment=found, arguments=vars(args), tables=tables),
            indent=2, default=str) + '\n')
