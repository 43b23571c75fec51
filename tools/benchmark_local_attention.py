"""Time and memory of local attention, and of the layers around it.

Example:
    python tools/benchmark_local_attention.py --check --memory
    python tools/benchmark_local_attention.py --layer --shape 256 50 84
"""
import argparse
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

import acmix_det  # noqa: F401
from acmix_det.evaluation.backend_check import backend_errors
from acmix_det.evaluation.benchmark import in_fresh_process
from acmix_det.evaluation.benchmark_peers import PEERS, missing
from acmix_det.evaluation.benchmark_report import (add_options, as_dicts,
                                                   check_options, environment,
                                                   header, run_rows,
                                                   show_rows, write_json)
from acmix_det.evaluation.markdown import markdown_table
from acmix_det.layers import ACmix2d, StandAloneSelfAttention2d
from acmix_det.ops import local_attention
from acmix_det.ops.local_attention import BACKENDS, MODULES

SHAPES = [(256, 100, 168), (64, 200, 336)]  # C4 and C2 of an 800 x 1344 image
CONV = 'nn.Conv2d 3x3'
LAYERS = dict(SASA=StandAloneSelfAttention2d, ACmix=ACmix2d)
FORWARD, BACKWARD = 'forward', 'forward + backward'
PEER_SECONDS = 180  # until a peer has compiled and run once


class Problem(NamedTuple):
    """One shape and what is the same for all of its rows."""
    channels: int
    height: int
    width: int
    batch_size: int
    num_heads: int
    attn_kernel_size: int
    dtype: str
    device: str
    position: str


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shape', type=int, nargs=3, action='append',
                        metavar=('C', 'H', 'W'),
                        help='channels, height and width; may be repeated '
                        '(default: 256 100 168 and 64 200 336)')
    parser.add_argument('--num-heads', type=int, default=8,
                        help='default: %(default)s')
    parser.add_argument('--attn-kernel-size', type=int, default=7,
                        help='extent of the neighborhood, odd '
                        '(default: %(default)s)')
    parser.add_argument('--position', choices=('relative', 'none'),
                        default='relative', help='relative positions of SASA, '
                        'or none (default: %(default)s)')
    parser.add_argument('--dtype', default='float32',
                        choices=('float32', 'float16', 'bfloat16'),
                        help='default: %(default)s')
    parser.add_argument('--backward', choices=('yes', 'no', 'only'),
                        default='yes', help='forward and forward + backward, '
                        'or one of them (default: %(default)s)')
    parser.add_argument('--layer', action='store_true',
                        help='the layers SASA and ACmix, projections '
                        'included, instead of the operation')
    parser.add_argument('--backends', nargs='+', choices=BACKENDS,
                        help='rows (default: all; with --layer, auto)')
    parser.add_argument('--no-peers', action='store_true',
                        help='leave out NATTEN and FlexAttention')
    parser.add_argument('--check', action='store_true',
                        help='first compare the backends with the reference '
                        'in float64; exit status 1 if one is wrong')
    add_options(parser, repeats=30, seconds=10)
    args = parser.parse_args()
    check_options(parser, args)
    if args.num_heads < 1:
        parser.error(f'--num-heads must be positive, got {args.num_heads}')
    if args.attn_kernel_size < 1 or args.attn_kernel_size % 2 == 0:
        parser.error('--attn-kernel-size must be positive and odd, got '
                     f'{args.attn_kernel_size}')
    args.shape = [tuple(shape) for shape in args.shape or SHAPES]
    for shape in args.shape:
        if min(shape) < 1:
            parser.error(f'--shape must be positive, got {shape}')
        if shape[0] % args.num_heads:
            parser.error('--shape must have channels that --num-heads '
                         f'{args.num_heads} divides, got {shape[0]}')
    if args.backends is None:
        args.backends = ['auto'] if args.layer else list(BACKENDS[1:])
    args.backends = list(dict.fromkeys(args.backends))
    return args


# Rows: each builds a function and its inputs, the first of which has the
# shape of the output.


def _rand(problem, *shape):
    return torch.randn(shape).to(
        problem.device, getattr(torch, problem.dtype)).requires_grad_()


def build_conv(problem):
    c = problem.channels
    x = _rand(problem, problem.batch_size, c, problem.height, problem.width)
    return (lambda *inputs: F.conv2d(*inputs, padding=1),
            [x, _rand(problem, c, c, 3, 3)])


def build_layer(name, problem):
    kind, _, backend = name.partition(' ')
    options = {}
    if kind == 'SASA':
        options['position'] = problem.position
    layer = LAYERS[kind](
        problem.channels, problem.channels, 3, padding=1, bias=False,
        num_heads=problem.num_heads, backend=backend or 'auto',
        attn_kernel_size=problem.attn_kernel_size, **options)
    layer.to(problem.device, getattr(torch, problem.dtype))
    x = _rand(problem, problem.batch_size, problem.channels, problem.height,
              problem.width)
    return lambda x, *params: layer(x), [x, *layer.parameters()]


def build_operation(backend, problem):
    n, k = problem.num_heads, problem.attn_kernel_size
    d = problem.channels // n
    inputs = [
        _rand(problem, problem.batch_size, n, d, problem.height,
              problem.width) for _ in range(3)
    ]
    if problem.position == 'relative':
        inputs += [_rand(problem, n, c, k) for c in (d // 2, d - d // 2)]

    def run(query, key, value, rel_pos_h=None, rel_pos_w=None):
        return local_attention(query, key, value, k, rel_pos_h=rel_pos_h,
                               rel_pos_w=rel_pos_w, backend=backend)

    return run, inputs


def build_peer(name, problem):
    function, shape = PEERS[name](
        problem.batch_size, problem.num_heads,
        problem.channels // problem.num_heads, problem.height, problem.width,
        problem.attn_kernel_size, problem.device)
    return function, [_rand(problem, *shape) for _ in range(3)]


def make_run(name, problem, backward):
    """Callable of a row that returns outputs and, if asked, gradients."""
    torch.manual_seed(0)
    if name == CONV:
        function, inputs = build_conv(problem)
    elif name in PEERS:
        function, inputs = build_peer(name, problem)
    elif name.split()[0] in LAYERS:
        function, inputs = build_layer(name, problem)
    else:
        function, inputs = build_operation(name, problem)
    if not backward:
        # on CPUs FlexAttention takes no inputs that require gradients
        inputs = [x.detach() for x in inputs]

        def run():
            with torch.no_grad():
                return [function(*inputs)]

        return run
    upstream = torch.randn_like(inputs[0])

    def run_backward():
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    return run_backward


def prepare(name, problem, backward):
    """For ``peak_memory``: (warm-up, run)."""
    run = make_run(name, problem, backward)
    if name in PEERS:  # what is compiled depends on the size
        return run, run
    small = problem._replace(height=8, width=8, batch_size=1)
    return make_run(name, small, backward), run


def try_run(name, problem, backward):
    make_run(name, problem, backward)()
    if problem.device == 'cuda':
        torch.cuda.synchronize()


def choose_rows(problem, args, notes):
    """Names of the rows that can run; why others cannot goes to ``notes``."""
    query = torch.empty(
        1, problem.num_heads, problem.channels // problem.num_heads, 1, 1,
        device=problem.device, dtype=getattr(torch, problem.dtype))
    rows = [CONV]
    for backend in args.backends:
        reason = None
        if backend != 'auto':
            reason = MODULES[backend].can_use(query)
        if reason is not None:
            notes.append(f'{backend}: cannot run, {reason}')
        elif args.layer:
            suffix = '' if backend == 'auto' else f' {backend}'
            rows += [kind + suffix for kind in LAYERS]
        else:
            rows.append(backend)
    return rows


def choose_peers(problem, passes, notes):
    """(name, pass) of what runs of the peers, tried in their own processes."""
    found = []
    for name in PEERS:
        if missing(name) is not None:
            notes.append(f'{name}: {missing(name)}')
            continue
        for title in passes:
            try:
                in_fresh_process(try_run, name, problem, title == BACKWARD,
                                 timeout=PEER_SECONDS)
                found.append((name, title))
            except RuntimeError as error:
                notes.append(f'{name}, {title}: cannot run here, {error}')
    if found and problem.position == 'relative':
        names = ' and '.join(dict.fromkeys(name for name, _ in found))
        notes.append(f'{names}: without relative positions')
    if any(name == 'NATTEN' for name, _ in found):
        notes.append('NATTEN: at the border it shifts the neighborhood '
                     'inwards')
    return found


def check(device):
    """Print the errors of every backend; return whether all are right."""
    errors, notes = backend_errors(device)
    rows = [(e.backend, e.dtype, e.cases, f'{e.output:.1e}',
             f'{e.gradients:.1e}', f'{e.tolerance:.0e}',
             'right' if e.right else 'WRONG') for e in errors]
    titles = ('backend', 'dtype', 'cases', 'output', 'gradients', 'tolerance',
              '')
    print('\nLargest errors against the reference in float64, as parts of the '
          f'largest value\n\n{markdown_table(titles, rows)}')
    show_notes(notes)
    return all(e.right for e in errors)


def show_notes(notes):
    if notes:
        print('\n' + '\n'.join(f'- {note}' for note in notes))


def main():
    args = parse_args()
    found = environment(args.device)
    print(header(found))
    if args.check and not check(args.device):
        sys.exit('A backend is wrong; nothing was timed.')
    passes = {'yes': (FORWARD, BACKWARD), 'no': (FORWARD, ),
              'only': (BACKWARD, )}[args.backward]
    tables = []
    for shape in args.shape:
        problem = Problem(*shape, args.batch_size, args.num_heads,
                          args.attn_kernel_size, args.dtype, args.device,
                          args.position)
        notes = []
        chosen = [(name, title) for name in choose_rows(problem, args, notes)
                  for title in passes]
        if not args.layer and not args.no_peers:
            chosen += choose_peers(problem, passes, notes)
        rows, failed = run_rows(
            make_run, prepare,
            {key: (key[0], problem, key[1] == BACKWARD)
             for key in chosen}, args)
        notes += failed
        title = (f'({args.batch_size}, {", ".join(map(str, shape))}) '
                 f'{args.dtype}')
        print(f'\n{show_rows(title, rows, args.memory)}')
        show_notes(notes)
        tables.append(dict(title=title, rows=as_dicts(rows), notes=notes))
    print(f'\n{args.num_heads} heads, k = {args.attn_kernel_size}; ratio: to '
          f'{CONV}, same channels.' + (
              ' Peak: beyond the inputs; extra: beyond outputs and gradients '
              'too.' if args.memory else ''))
    if args.json is not None:
        write_json(args.json, found, args, tables)


if __name__ == '__main__':
    main()
