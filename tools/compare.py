"""Compare trainings: accuracy, cost, speed, AP by class, detections.

Reads the work directories of mmdet trainings, finished or not. The first one
is the baseline. A name that is given several times stands for trainings of one
model with several seeds: mean and standard deviation are shown. Relative paths
in the configs start at the current directory. A GPU is used if there is one.

Example:
    python tools/compare.py work_dirs/conv work_dirs/sasa --out report --speed
    python tools/compare.py runs/conv-0 runs/conv-1 runs/sasa-0 runs/sasa-1 \\
        --names conv conv SASA SASA
"""
import argparse
import json
import os.path as osp
import pickle
import sys
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Dict, List, NamedTuple, Optional

import mmcv
import mmengine
import numpy as np
from mmengine.config import Config, DictAction

import acmix_det  # noqa: F401
from acmix_det.evaluation import (Run, Schedule, build_detector,
                                  count_complexity, find_config, read_run,
                                  read_schedule)
from acmix_det.evaluation.benchmark import summary
from acmix_det.evaluation.benchmark_report import environment
from acmix_det.evaluation.report import (Entry, as_csv, as_dict, cells,
                                         class_cells, config_diff, table)
from acmix_det.evaluation.runs import MAP, class_ap

SCORE_THRESHOLD = 0.3
MAX_DIFFS = 40  # settings shown for each model
TILE_WIDTH = 260  # pixels of one image in the report
# RuntimeError: torch's, of a file that was cut while it was written
USER_ERRORS = (OSError, ValueError, ImportError, KeyError, EOFError,
               RuntimeError, pickle.UnpicklingError)


class Source(NamedTuple):
    """A work directory; no config if it is missing and may be."""
    name: str
    config: Optional[Path]
    cfg: Optional[Config]
    run: Run


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('work_dirs', nargs='+', type=Path, metavar='WORK_DIR',
                        help='work directories of trainings')
    parser.add_argument('--names', nargs='+', metavar='NAME',
                        help='one for each work directory (default: its last '
                        'part)')
    parser.add_argument('--baseline', metavar='NAME', help='model that the '
                        'others are compared with (default: the first one)')
    parser.add_argument('--out', type=Path, metavar='DIR', help='write '
                        'report.html, results.md, .csv, .json and plots')
    parser.add_argument('--shape', type=int, nargs='+',
                        metavar=('HEIGHT', 'WIDTH'), help='image size for '
                        'MACs and FLOPs; one number for a square (default: '
                        "that of the baseline's val pipeline)")
    parser.add_argument('--speed', action='store_true', help='measure time '
                        'and peak memory of one image')
    parser.add_argument('--per-class', action='store_true', help='evaluate '
                        'the last checkpoints for AP by class; with --out '
                        'once only')
    parser.add_argument('--images', type=int, default=4, metavar='N',
                        help='validation images for drawn detections and '
                        '--speed (default: %(default)s)')
    parser.add_argument('--allow-missing', action='store_true',
                        help='show work directories that do not exist or '
                        'hold no config as such')
    parser.add_argument('--format', choices=('md', 'csv', 'json'),
                        default='md', help='printed (default: %(default)s)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction,
                        default={}, help='changes of all configs, key=value, '
                        'such as another place of the data')
    args = parser.parse_args()
    check_args(parser, args)
    return args


def check_args(parser, args):
    count = len(args.work_dirs)
    repeated = [x for x, n in Counter(
        x.resolve() for x in args.work_dirs).items() if n > 1]
    if repeated:
        parser.error(f'WORK_DIR must be given once, got {repeated[0]} twice')
    if args.names is None:
        args.names = [x.resolve().name for x in args.work_dirs]
        if len(set(args.names)) < count:
            parser.error('WORK_DIR must differ in the last part, or have '
                         f'--names, got {" ".join(map(str, args.work_dirs))}')
    elif len(args.names) != count:
        parser.error(f'--names must be one for each WORK_DIR ({count}), got '
                     f'{len(args.names)}')
    if not all(name.strip() for name in args.names):
        parser.error(f'--names must not be empty, got {args.names}')
    if args.baseline is None:
        args.baseline = args.names[0]
    elif args.baseline not in args.names:
        parser.error('--baseline must be one of '
                     f'{", ".join(dict.fromkeys(args.names))}, got '
                     f'{args.baseline}')
    if args.shape and (len(args.shape) > 2 or min(args.shape) < 1):
        parser.error('--shape must be one or two positive numbers, got '
                     f'{args.shape}')
    if args.images < 0 or (args.speed and not args.images):
        parser.error('--images must be positive (0 is possible without '
                     f'--speed), got {args.images}')
    if args.out and osp.exists(args.out) and not osp.isdir(args.out):
        parser.error(f'--out must be a folder, got {args.out}')


def read_source(name, work_dir, args):
    try:
        config = find_config(work_dir)
    except FileNotFoundError as error:
        if not args.allow_missing:
            sys.exit(f'{error}\n--allow-missing shows it as missing.')
        run = read_run(work_dir, Schedule(1))
        return Source(name, None, None, run._replace(checkpoint=None, done=0,
                                                     metrics={}))
    try:
        cfg = Config.fromfile(config)
        cfg.merge_from_dict(args.cfg_options)
        return Source(name, config, cfg, read_run(work_dir,
                                                  read_schedule(cfg)))
    except Exception as error:  # a config is Python: anything can happen
        sys.exit(f'{config} could not be used: {summary(error)}')


def group(sources, baseline):
    """Name to its sources, the baseline first."""
    groups: Dict[str, List[Source]] = {baseline: []}
    for source in sources:
        groups.setdefault(source.name, []).append(source)
    for name, members in groups.items():
        models = [x.cfg.model for x in members if x.cfg]
        if any(model != models[0] for model in models):
            sys.exit('--names must be the same only for trainings of one '
                     f'model with one schedule, got {name} for several '
                     'models')
        if len({x.run.schedule for x in members if x.cfg}) > 1:
            sys.exit('--names must be the same only for trainings of one '
                     f'model with one schedule, got {name} for several '
                     'schedules')
    return groups


def first_config(members):
    return next((x.cfg for x in members if x.cfg), None)


def image_size(cfg):
    """Height and width of the val pipeline's Resize, padded as the model."""
    for step in cfg.val_dataloader.dataset.get('pipeline', []):
        if step['type'].split('.')[-1] == 'Resize' and 'scale' in step:
            scale = step['scale']
            width, height = (scale, scale) if isinstance(scale, int) else scale
            by = cfg.model.get('data_preprocessor', {}).get(
                'pad_size_divisor', 1)
            return -(-height // by) * by, -(-width // by) * by
    sys.exit("--shape must be given, got none, and the baseline's val "
             'pipeline has no Resize with a scale')


def count(name, cfg, size):
    try:
        return count_complexity(build_detector(cfg), size)
    except Exception as error:  # of any detector's own code
        warn(f'The cost of {name} could not be counted: {summary(error)}')


def warn(text):
    print(f'warning: {text}', file=sys.stderr)


def stop(name, error):
    plain = isinstance(error, (OSError, ValueError, pickle.UnpicklingError))
    sys.exit(f'{name}: {error if plain else summary(error)}')


def classes_of(members, args, notes):
    """AP by class, mean over the runs; from the log, or evaluated."""
    found = []
    for _, _, cfg, run in members:
        values = run.classes
        if not values and args.per_class and run.checkpoint:
            print(f'AP by class of {run.checkpoint}', file=sys.stderr)
            from acmix_det.evaluation.inference import cached_evaluation
            cache = args.out and args.out / 'evaluations.json'
            metrics = cached_evaluation(cfg, run.checkpoint, cache)
            values = class_ap(metrics)
            logged, again = run.final(MAP), metrics.get(MAP)
            if None not in (logged, again) and abs(logged - again) > 0.0015:
                notes.append(
                    f'{run.work_dir}: mAP is {logged:.3f} in the log, but '
                    f'{again:.3f} for the last checkpoint now; the AP by '
                    'class is of the latter.')
            if not values:
                notes.append(f'{run.work_dir}: nothing was detected, so '
                             'there is no AP by class.')
        if values:
            found.append(values)
    names = dict.fromkeys(x for values in found for x in values)
    result = {}
    for name in names:
        known = [x[name] for x in found if x.get(name) is not None]
        result[name] = mean(known) if known else None
    return result


def measure(entries, groups, samples, device):
    """Add time and peak memory to the entries that have a checkpoint."""
    from acmix_det.evaluation.inference import (load_detector, measure_memory,
                                                measure_speed)
    images = [sample.image for sample in samples]
    chosen = with_checkpoint(groups)
    models = {
        name: load_detector(x.cfg, x.run.checkpoint, device)
        for name, x in chosen.items()
    }
    times = measure_speed(models, images, device)
    del models
    largest = max(images, key=lambda image: image.size)
    memory = {}
    for name, x in chosen.items():
        print(f'measuring the memory of {name}', file=sys.stderr)
        memory[name] = measure_memory(x.cfg, x.run.checkpoint, largest, device)
    return [
        e._replace(speed=times.get(e.name),
                   memory=memory[e.name].peak if memory.get(e.name) else None)
        for e in entries
    ]


def with_checkpoint(groups):
    """Name to its first source that has a checkpoint."""
    found = {}
    for name, members in groups.items():
        for x in members:
            if x.run.checkpoint:
                found.setdefault(name, x)
    return found


def draw(entries, groups, samples, device, path):
    from acmix_det.evaluation.inference import (class_names, detect,
                                                load_detector)
    from acmix_det.evaluation.plots import draw_detections
    columns = {'ground truth': [sample.boxes for sample in samples]}
    classes = None
    labels = {entry.name: entry.label for entry in entries}
    for name, x in with_checkpoint(groups).items():
        classes = classes or class_names(x.cfg)
        if class_names(x.cfg) != classes:
            warn(f'{name} has other classes; its detections are not drawn.')
            continue
        model = load_detector(x.cfg, x.run.checkpoint, device)
        columns[labels[name]] = [
            detect(model, sample.image, SCORE_THRESHOLD) for sample in samples
        ]
    draw_detections([sample.image for sample in samples], columns,
                    classes or [], path)
    return len(columns)


def notes_of(entries, groups, size, timed):
    base = entries[0].name
    notes = [
        'mAP and its parts: COCO metrics of the last evaluation on the '
        'validation set, only of finished runs; best mAP: the highest of any '
        'evaluation (when); - : not known, or no such objects.',
        f'MACs and FLOPs (2 per MAC): one image of {size[0]} x {size[1]}; '
        f'saved: less than {base}; training: time of the training '
        'iterations, evaluation excluded, with whatever else the machine did '
        '(tools/benchmark_detector.py compares speed).'
    ]
    if any(len(e.runs) > 1 for e in entries):
        notes.append('n runs of one model: mean and sample standard '
                     'deviation over the finished ones.')
    if timed:
        notes.append(
            'ms per image: median, models in turns on the same '
            f'{timed} images, decoding and NMS included, loading excluded; '
            'memory: peak of one image beyond weights and libraries.')
    for entry in entries:
        if entry.finished and not entry.values(MAP):
            notes.append(f'{entry.name}: no bounding-box metrics of COCO in '
                         'the last evaluation (nothing detected, or another '
                         'evaluator).')
    cfgs = {name: first_config(x) for name, x in groups.items()}
    for name, cfg in cfgs.items():
        if cfg and cfgs[base] and validation(cfg) != validation(cfgs[base]):
            notes.append(f'{name} was evaluated on another data set than '
                         f'{base}; their mAP cannot be compared.')
    return notes


def validation(cfg):
    dataset = cfg.val_dataloader.dataset
    return {
        key: dataset.get(key)
        for key in ('type', 'data_root', 'ann_file', 'metainfo')
    }


def source_cells(groups):
    header = ('model', 'work directory', 'config', 'checkpoint', 'state')
    return header, [(name, str(x.run.work_dir),
                     x.config.name if x.config else '-',
                     x.run.checkpoint.name if x.run.checkpoint else '-',
                     x.run.status) for name, members in groups.items()
                    for x in members]


def diffs_of(groups, baseline):
    base = first_config(groups[baseline])
    found = []
    for name, members in groups.items():
        cfg = first_config(members)
        if name != baseline and cfg and base:
            rows = config_diff(cfg, base)
            found.append((name, rows[:MAX_DIFFS],
                          max(len(rows) - MAX_DIFFS, 0)))
    return found


def write(entries, groups, notes, samples, device, out):
    """Write tables, plots and the report."""
    from acmix_det.evaluation.html_report import Picture, render
    from acmix_det.evaluation.plots import plot_classes, plot_cost, plot_curves
    plot_curves(entries, out / 'curves.png')
    plots = [Picture(out / 'curves.png', 'mAP during the training')]
    for cost, text in (('params', 'parameters'), ('flops', 'FLOPs')):
        path = out / f'map_{cost}.png'
        plot_cost(entries, path, cost)
        plots.append(Picture(path, f'mAP against {text}, finished runs'))
    path = out / 'classes.png'
    class_plot = None
    if plot_classes(entries, path):
        class_plot = Picture(path, 'difference of AP to the baseline')
    detections, columns = None, 0
    if samples:
        path = out / 'detections.png'
        columns = draw(entries, groups, samples, device, path)
        detections = Picture(
            path, f'Detections of the last checkpoints (score of at least '
            f'{SCORE_THRESHOLD}) beside the ground truth')
    versions = dict(environment(device), mmengine=mmengine.__version__,
                    mmcv=mmcv.__version__, numpy=np.__version__)
    names = [entry.name for entry in entries]
    html = render(
        title=f'Comparison of {", ".join(names)}', results=cells(entries),
        notes=notes, sources=source_cells(groups), plots=plots,
        classes=class_cells(entries), class_plot=class_plot,
        detections=detections, width=TILE_WIDTH * columns,
        diffs=diffs_of(groups, names[0]),
        versions=[(name, str(value)) for name, value in versions.items()])
    (out / 'report.html').write_text(html, encoding='utf-8')
    for kind in ('md', 'csv', 'json'):
        (out / f'results.{kind}').write_text(
            show(entries, notes, kind) + '\n', encoding='utf-8')


def show(entries, notes, kind):
    if kind == 'json':
        return json.dumps(dict(models=as_dict(entries), notes=notes), indent=2)
    if kind == 'csv':
        return as_csv(entries)
    parts = [table(entries)]
    if any(entry.classes for entry in entries):
        parts.append(table(entries, class_cells))
    return '\n\n'.join([*parts, '\n'.join(f'- {note}' for note in notes)])


def main():
    args = parse_args()
    sources = [
        read_source(name, work_dir, args)
        for name, work_dir in zip(args.names, args.work_dirs)
    ]
    groups = group(sources, args.baseline)
    if args.out:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f'--out must be a folder, got {args.out}: {error}')
    base = first_config(groups[args.baseline]) or next(
        (x.cfg for x in sources if x.cfg), None)
    if base is None:
        sys.exit('WORK_DIR must hold at least one config, got '
                 f'{" ".join(map(str, args.work_dirs))}')
    size = (args.shape[0], args.shape[-1]) if args.shape else image_size(base)
    extra = []
    entries = []
    for name, members in groups.items():
        cfg = first_config(members)
        try:
            classes = classes_of(members, args, extra)
        except USER_ERRORS as error:
            stop(name, error)
        entries.append(
            Entry(name, [x.run for x in members],
                  cfg and count(name, cfg, size), classes))
    from acmix_det.evaluation.inference import default_device, pick_samples
    device, samples = default_device(), []
    if with_checkpoint(groups) and (args.speed or args.out and args.images):
        try:
            samples = pick_samples(base, args.images)
        except USER_ERRORS as error:
            if args.speed or isinstance(error, ValueError):
                stop('validation images', error)
            extra.append(f'Detections are not drawn: {error}')
            warn(extra[-1])
    try:
        if args.speed and samples:
            entries = measure(entries, groups, samples, device)
        timed = len(samples) if args.speed else 0
        notes = notes_of(entries, groups, size, timed) + extra
        if args.out:
            write(entries, groups, notes, samples, device, args.out)
    except USER_ERRORS as error:
        stop('comparison', error)
    print(show(entries, notes, args.format))
    if args.format == 'csv':  # has no place for them
        print('\n'.join(notes), file=sys.stderr)
    if args.out:
        print(f'\nReport: {args.out / "report.html"}', file=sys.stderr)


if __name__ == '__main__':
    main()
