"""Compare finished runs: table, plots, and detections side by side."""
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from .complexity import Complexity
from .runs import AP50, MAP, Run


class Entry(NamedTuple):
    """One model of a comparison; the first one is the baseline."""
    name: str
    run: Run
    complexity: Complexity


def saving(value: Optional[float], baseline: Optional[float]) -> str:
    """Percent less than the baseline: '+20 %' is a fifth less."""
    if value is None or not baseline:
        return '-'
    return f'{100 * (1 - value / baseline):+.0f} %'


def _row(entry: Entry, baseline: Entry) -> List[str]:
    run, cost = entry.run, entry.complexity
    first = baseline.complexity
    number = [
        '-' if x is None else f'{x:.3f}'
        for x in (run.final(MAP), run.final(AP50))
    ]
    same = entry is baseline
    minutes = f'{run.seconds / 60:.1f} min' if run.finished else '-'
    return [
        entry.name if run.finished else f'{entry.name}, {run.status}',
        *number, f'{cost.params / 1e6:.3f} M',
        '' if same else saving(cost.params, first.params),
        f'{cost.macs / 1e9:.3f} G', f'{cost.flops / 1e9:.3f} G',
        '' if same else saving(cost.flops, first.flops), minutes
    ]


HEADER = ('model', 'mAP', 'AP50', 'parameters', 'saved', 'MACs', 'FLOPs',
          'saved', 'training')


def table(entries: Sequence[Entry]) -> str:
    """Markdown table; savings are relative to the first entry.

    What was not reached shows as '-', with the state of the run.
    """
    rows = [list(HEADER)] + [_row(e, entries[0]) for e in entries]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        '| ' + ' | '.join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))) + ' |'
        for row in rows
    ]
    rule = ['-' * widths[0]] + ['-' * (w - 1) + ':' for w in widths[1:]]
    lines.insert(1, '| ' + ' | '.join(rule) + ' |')
    return '\n'.join(lines)


def as_dict(entries: Sequence[Entry]) -> List[dict]:
    """The comparison as plain types, None where there is no value."""
    return [
        dict(
            model=e.name,
            status=e.run.status,
            mAP=e.run.final(MAP),
            AP50=e.run.final(AP50),
            params=e.complexity.params,
            macs=e.complexity.macs,
            flops=e.complexity.flops,
            training_seconds=e.run.seconds if e.run.finished else None,
            mAP_by_epoch=dict(zip(*e.run.curve(MAP)))) for e in entries
    ]


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('plots need matplotlib, which is not installed: '
                          "pip install 'acmix_det[digits]'") from error
    matplotlib.use('Agg')  # files only, no screen
    from matplotlib import pyplot
    return pyplot


def plot_runs(entries: Sequence[Entry], path: Path) -> None:
    """Draw learning curves, and mAP against parameters and MACs."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout='constrained')
    for i, entry in enumerate(entries):
        color = f'C{i}'
        axes[0].plot(*entry.run.curve(MAP), 'o-', color=color,
                     label=entry.name)
        value = entry.run.final(MAP)
        if value is None:
            continue
        for axis, cost in ((axes[1], entry.complexity.params / 1e6),
                           (axes[2], entry.complexity.macs / 1e9)):
            axis.plot(cost, value, 'o', color=color, markersize=10)
            axis.annotate(entry.name, (cost, value), (0, 10), ha='center',
                          textcoords='offset points')
    axes[0].set(xlabel='epoch', ylabel='validation mAP', ylim=(0, None))
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()
    axes[1].set(xlabel='parameters (M)')
    axes[2].set(xlabel='MACs per image (G)')
    for axis in axes[1:]:
        axis.margins(x=0.3)
        axis.set(xlim=(0, None), ylim=(0, 1), ylabel='validation mAP')
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Boxes(NamedTuple):
    """Boxes of one image: (n, 4) corners in pixels, labels, maybe scores."""
    corners: np.ndarray
    labels: np.ndarray
    scores: Optional[np.ndarray] = None


def draw_detections(images: Sequence[np.ndarray],
                    columns: Dict[str, Sequence[Boxes]],
                    classes: Sequence[str], path: Path) -> None:
    """Draw boxes of several models on the same images, a row each.

    Args:
        images (Sequence[ndarray]): RGB images, (H, W, 3).
        columns (dict[str, Sequence[Boxes]]): Title of a column to its boxes,
            one entry for each image.
        classes (Sequence[str]): Class names.
        path (Path): The picture to write.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(
        len(images), len(columns), squeeze=False, layout='constrained',
        figsize=(3 * len(columns), 3.1 * len(images)))
    for row, image in enumerate(images):
        for axis, (title, boxes) in zip(axes[row], columns.items()):
            axis.imshow(image, interpolation='bilinear')
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title)
            _draw_boxes(axis, boxes[row], classes)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_boxes(axis, boxes: Boxes, classes: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle
    for i, (x1, y1, x2, y2) in enumerate(boxes.corners):
        label = int(boxes.labels[i])
        color = f'C{label % 10}'
        text = classes[label]
        if boxes.scores is not None:
            text += f' {boxes.scores[i]:.2f}'
        axis.add_patch(
            Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, color=color,
                      linewidth=2))
        axis.text(x1, max(y1 - 1, 6), text, fontsize=9, color='white',
                  bbox=dict(facecolor=color, edgecolor='none', pad=1))
