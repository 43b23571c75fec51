"""Train RetinaNet with convolution, SASA and ACmix on digits, and compare.

Interrupted runs continue where they stopped; finished ones are not trained
again.

Example:
    python tools/demo.py --work-dir work_dirs/demo
"""
import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

from mmengine.config import Config, DictAction
from tqdm import tqdm

import acmix_det  # noqa: F401
from acmix_det.datasets import make_digits
from acmix_det.evaluation import (build_detector, count_complexity, read_run,
                                  read_schedule)
from acmix_det.evaluation.inference import (class_names, detect,
                                            load_detector, pick_samples)
from acmix_det.evaluation.plots import draw_detections, plot_runs
from acmix_det.evaluation.report import Entry, as_dict, table

ROOT = Path(__file__).resolve().parents[1]
# the first one is what the others are compared with
MODELS = {
    'convolution': 'retinanet_r18_fpn_digits.py',
    'SASA': 'retinanet_r18-sasa_fpn-sasa_digits.py',
    'ACmix': 'retinanet_r18-acmix_fpn-acmix_digits.py',
}
SCORE_THRESHOLD = 0.3
PICTURES = 4  # validation images with drawn detections

TRAIN_LINE = re.compile(
    r'Epoch\(train\)\s+\[(\d+)\]\[\s*(\d+)/(\d+)\].* loss: ([\d.]+)')
VAL_LINE = re.compile(r'coco/bbox_mAP: (-?[\d.]+)')


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--work-dir', type=Path,
                        default=Path('work_dirs/demo'),
                        help='logs, checkpoints, results (%(default)s)')
    parser.add_argument('--data-root', type=Path, default=Path('data/digits'),
                        help='the digits data set, made if not there '
                        '(%(default)s)')
    parser.add_argument('--num-train', type=int, default=2800,
                        help='training images (%(default)s)')
    parser.add_argument('--num-val', type=int, default=200,
                        help='validation images (%(default)s)')
    parser.add_argument('--seed', type=int, default=0,
                        help='of the trainings (%(default)s)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction,
                        default={}, help='changes of all configs, key=value')
    return parser.parse_args()


def load_config(name, args):
    """Config of a model with this call's data, seed and changes."""
    cfg = Config.fromfile(ROOT / 'configs' / 'digits' / MODELS[name])
    root = args.data_root.resolve()
    changes = {'randomness.seed': args.seed}
    for split in ('train', 'val', 'test'):
        changes[f'{split}_dataloader.dataset.data_root'] = str(root)
    for split in ('val', 'test'):
        changes[f'{split}_evaluator.ann_file'] = str(root / 'annotations' /
                                                     'val.json')
    cfg.merge_from_dict({**changes, **args.cfg_options})
    return cfg


def prepare(name, cfg, args):
    """Write the config for the training; refuse a folder of another one."""
    work_dir = args.work_dir / name
    work_dir.mkdir(parents=True, exist_ok=True)
    meta = json.loads((args.data_root / 'meta.json').read_text())
    text = cfg.pretty_text + json.dumps(meta, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    stamp = work_dir / 'demo.sha256'
    if stamp.exists() and stamp.read_text() != digest:
        sys.exit(f'--work-dir holds a run of another config, data set or '
                 f'seed: {work_dir}\nTake another --work-dir or remove that '
                 'folder.')
    cfg.dump(work_dir / 'config.py')
    stamp.write_text(digest)
    return work_dir


def train(name, position, cfg, work_dir):
    """Train in a process of its own; show its progress in one line."""
    epochs = cfg.train_cfg.max_epochs
    command = [
        sys.executable, str(ROOT / 'tools' / 'train.py'),
        str(work_dir / 'config.py'), '--work-dir', str(work_dir), '--resume'
    ]
    log = work_dir / 'train.log'
    tail = deque(maxlen=25)
    shown = {}
    print(f'[{position}/{len(MODELS)}] {name}: {epochs} epochs, log in {log}')
    process = subprocess.Popen(command, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True,
                               errors='replace')
    with open(log, 'a') as file, tqdm(
            unit='it', dynamic_ncols=True, desc='starting',
            mininterval=0.5 if sys.stderr.isatty() else 15) as bar:
        try:
            for line in process.stdout:
                file.write(line)
                tail.append(line)
                if match := TRAIN_LINE.search(line):
                    epoch, step, steps = map(int, match.groups()[:3])
                    if bar.total is None:  # iterations before a resume
                        bar.reset(epochs * steps)
                        bar.initial = (epoch - 1) * steps
                    bar.set_description(f'epoch {epoch}/{epochs}', False)
                    shown['loss'] = match[4]
                    bar.set_postfix(shown, refresh=False)
                    bar.update((epoch - 1) * steps + step - bar.n)
                elif match := VAL_LINE.search(line):
                    shown['mAP'] = match[1]
                    bar.set_postfix(shown)
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()
            bar.close()
            sys.exit('\nStopped. The same command continues from the last '
                     'finished epoch.')
    if code:
        sys.exit(f'{"".join(tail)}\nThe training of {name} failed (exit '
                 f'status {code}); its log is {log}.')


def repeat_last_epoch(run):
    """Go back one epoch where the last one was saved but not evaluated."""
    pointer = run.work_dir / 'last_checkpoint'
    previous = run.checkpoint.with_name(f'epoch_{run.done - 1}.pth')
    if previous.is_file():
        pointer.write_text(str(previous))
    else:
        pointer.unlink()


def draw(entries, cfg, args):
    """Draw the detections of every model on the same images."""
    samples = pick_samples(cfg, PICTURES)
    columns = {'ground truth': [sample.boxes for sample in samples]}
    for entry in entries:
        run, = entry.runs
        model = load_detector(Config.fromfile(run.work_dir / 'config.py'),
                              run.checkpoint, 'cpu')
        columns[entry.name] = [
            detect(model, sample.image, SCORE_THRESHOLD) for sample in samples
        ]
    path = args.work_dir / 'detections.png'
    draw_detections([sample.image for sample in samples], columns,
                    class_names(cfg), path)
    return path


def main():
    args = parse_args()
    try:
        make_digits(str(args.data_root), num_train=args.num_train,
                    num_val=args.num_val)
    except (ValueError, FileExistsError, ImportError) as error:
        sys.exit(str(error))
    entries = []
    for position, name in enumerate(MODELS, 1):
        cfg = load_config(name, args)
        work_dir = prepare(name, cfg, args)
        schedule = read_schedule(cfg)
        run = read_run(work_dir, schedule)
        if run.finished:
            print(f'[{position}/{len(MODELS)}] {name}: trained already')
        else:
            if run.done >= schedule.total:
                repeat_last_epoch(run)
            train(name, position, cfg, work_dir)
            run = read_run(work_dir, schedule)
        size = cfg.scale[::-1]
        entries.append(
            Entry(name, [run], count_complexity(build_detector(cfg), size)))

    plot_runs(entries, args.work_dir / 'curves.png')
    pictures = draw(entries, cfg, args)
    text = (
        f'{table(entries)}\n\nRetinaNet on digits, seed {args.seed}; mAP and '
        f'its parts on {args.num_val} validation images by pycocotools, '
        'best mAP: the highest of any epoch, MACs and '
        f'FLOPs (2 per MAC) for one image of {size[0]} x {size[1]}; saved: '
        'less than convolution; training: time of the training iterations, '
        'evaluation excluded, with whatever else the machine did.\n')
    (args.work_dir / 'results.md').write_text(text)
    (args.work_dir / 'results.json').write_text(
        json.dumps(dict(seed=args.seed, models=as_dict(entries)), indent=2))
    print(f'\n{text}\nTable: {args.work_dir / "results.md"}, results.json\n'
          f'Curves: {args.work_dir / "curves.png"}\n'
          f'Detections (score >= {SCORE_THRESHOLD}): {pictures}')


if __name__ == '__main__':
    main()
