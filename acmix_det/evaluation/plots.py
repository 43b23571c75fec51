"""Plots of a comparison, and detections side by side."""
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .report import Entry
from .runs import MAP, Run

MARKERS = 'osD^vPX*<>'
MAX_BARS = 40  # classes; of more, only those that differ most


@contextmanager
def _figure(path: Path, *args, **kwargs):
    """Make a figure and write it; no screen, and '$' is no mathematics."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('plots need matplotlib, which is not installed: '
                          "pip install 'acmix_det[digits]'") from error
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    with plt.rc_context({'text.parse_math': False}):
        figure, axes = plt.subplots(*args, layout='constrained', **kwargs)
        try:
            yield axes
            _add_legend(figure)
            figure.savefig(path, dpi=120)
        finally:
            plt.close(figure)


def _add_legend(figure) -> None:
    """One legend for all axes, below them, where it hides nothing."""
    handles = {}
    for axis in figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    if not handles:
        return
    width, height = figure.get_size_inches()
    longest = max(map(len, handles)) + 8
    columns = min(max(int(13 * width / longest), 1), len(handles))
    figure.set_figheight(height + 0.2 * -(-len(handles) // columns))
    figure.legend(handles.values(), handles, loc='outside lower center',
                  ncols=columns, fontsize='small')


def _legend_name(name: str) -> str:
    # matplotlib leaves names with '_' in front out of the legend
    return f' {name}' if name.startswith('_') else name


def _style(i: int) -> dict:
    return dict(color=f'C{i % 10}', marker=MARKERS[i % len(MARKERS)])


def _mean_curve(runs: Sequence[Run]) -> Tuple[List[float], List[float]]:
    """Mean mAP where every run that got so far was evaluated."""
    curves = [dict(zip(*run.curve(MAP))) for run in runs]
    epochs = sorted({e for curve in curves for e in curve})
    shared = [
        e for e in epochs
        if all(e in curve for curve in curves if curve and e <= max(curve))
    ]
    return shared, [
        mean(curve[e] for curve in curves if e in curve) for e in shared
    ]


def draw_curves(axis, entries: Sequence[Entry]) -> None:
    """Learning curves: mean of a model's runs, each run as a thin line."""
    units = {run.schedule.unit for e in entries for run in e.runs}
    for i, entry in enumerate(entries):
        for run in entry.runs:
            scale = run.schedule.total if len(units) > 1 else 1
            if len(entry.runs) > 1:
                epochs, values = run.curve(MAP)
                axis.plot(np.divide(epochs, scale), values, color=f'C{i % 10}',
                          alpha=0.35, linewidth=1)
        epochs, values = _mean_curve(entry.runs)
        if values:
            axis.plot(np.divide(epochs, scale), values, **_style(i),
                      label=_legend_name(entry.label))
    mixed = 'share of the training'
    axis.set(xlabel=mixed if len(units) > 1 else units.pop(),
             ylabel='validation mAP', ylim=(0, None), title='learning curves')
    if axis.get_xlabel() != mixed:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    if not axis.has_data():
        _say_empty(axis, 'no evaluation yet')


def draw_cost(axis, entries: Sequence[Entry], cost: str) -> None:
    """Final mAP against 'params' or 'flops'; deviations as bars."""
    unit, xlabel = dict(
        params=(1e6, 'parameters (M)'),
        flops=(1e9, 'FLOPs per image (G)'))[cost]
    points = []
    for i, entry in enumerate(entries):
        values, x = entry.values(MAP), getattr(entry, cost)
        if not values or x is None:
            continue
        y = mean(values)
        deviation = stdev(values) if len(values) > 1 else None
        points += [y - (deviation or 0), y + (deviation or 0)]
        axis.errorbar(x / unit, y, deviation, **_style(i), markersize=9,
                      capsize=4, linestyle='none',
                      label=_legend_name(entry.label))
    axis.set(xlabel=xlabel, ylabel='validation mAP',
             title=f'mAP against {xlabel.partition(" (")[0]}')
    axis.grid(alpha=0.3)
    if not points:
        _say_empty(axis, 'no finished run')
        return
    axis.set(xlim=(0, 1.15 * axis.get_xlim()[1]),
             ylim=(max(min(points) - 0.05, 0), min(max(points) + 0.05, 1)))


def _say_empty(axis, text: str) -> None:
    axis.text(0.5, 0.5, text, ha='center', va='center',
              transform=axis.transAxes)


def plot_runs(entries: Sequence[Entry], path: Path) -> None:
    """Draw learning curves, and mAP against parameters and FLOPs."""
    with _figure(path, 1, 3, figsize=(13, 4)) as axes:
        draw_curves(axes[0], entries)
        draw_cost(axes[1], entries, 'params')
        draw_cost(axes[2], entries, 'flops')


def plot_curves(entries: Sequence[Entry], path: Path) -> None:
    """Draw learning curves alone."""
    with _figure(path, figsize=(6.4, 4.2)) as axis:
        draw_curves(axis, entries)


def plot_cost(entries: Sequence[Entry], path: Path, cost: str) -> None:
    """Draw mAP against 'params' or 'flops' alone."""
    with _figure(path, figsize=(6.4, 4.2)) as axis:
        draw_cost(axis, entries, cost)


def class_differences(
        entries: Sequence[Entry]) -> Dict[str, List[Optional[float]]]:
    """Class to each further entry's AP less the first entry's."""
    base = entries[0].classes
    found = {}
    for name, value in base.items():
        others = [e.classes.get(name) for e in entries[1:]]
        if value is not None and any(x is not None for x in others):
            found[name] = [None if x is None else x - value for x in others]
    return found


def plot_classes(entries: Sequence[Entry], path: Path) -> bool:
    """Draw bars of the AP differences to the first entry, class by class.

    Returns:
        bool: False, and no file, if no class can be compared.
    """
    differences = class_differences(entries)
    if not differences:
        return False
    title = f'difference of AP to {entries[0].name}'
    if len(differences) > MAX_BARS:
        size = {
            name: max(abs(x) for x in row if x is not None)
            for name, row in differences.items()
        }
        kept = set(sorted(size, key=size.get)[-MAX_BARS:])
        title += f' ({MAX_BARS} of {len(differences)} classes, largest)'
        differences = {k: v for k, v in differences.items() if k in kept}
    others = entries[1:]
    rows = np.arange(len(differences))
    height = 0.8 / len(others)
    inches = 1.4 + len(rows) * max(0.26, 0.13 * len(others))
    with _figure(path, figsize=(6.4, inches)) as axis:
        for i, entry in enumerate(others):
            values = [
                np.nan if x[i] is None else x[i] for x in differences.values()
            ]
            axis.barh(rows + (i - (len(others) - 1) / 2) * height, values,
                      height, color=f'C{(i + 1) % 10}',
                      label=_legend_name(entry.label))
        axis.axvline(0, color='black', linewidth=0.8)
        axis.set_yticks(rows, list(differences))
        axis.invert_yaxis()
        axis.set(title=title, ylabel='class')
        axis.grid(axis='x', alpha=0.3)
        return True


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
    heights = [3 * x.shape[0] / x.shape[1] for x in images]
    with _figure(path, len(images), len(columns), squeeze=False,
                 height_ratios=heights,
                 figsize=(3.1 * len(columns),
                          sum(heights) + 0.1 * len(images) + 0.4)) as axes:
        for row, image in enumerate(images):
            for axis, (title, boxes) in zip(axes[row], columns.items()):
                axis.imshow(image, interpolation='bilinear')
                axis.set_axis_off()
                if row == 0:
                    axis.set_title(title, fontsize=11, wrap=True)
                _draw_boxes(axis, boxes[row], classes)


def _draw_boxes(axis, boxes: Boxes, classes: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle
    # best ones last, on top
    for i in reversed(range(len(boxes.corners))):
        x1, y1, x2, y2 = boxes.corners[i]
        label = int(boxes.labels[i])
        color = f'C{label % 10}'
        text = classes[label]
        if boxes.scores is not None:
            text += f' {boxes.scores[i]:.2f}'
        axis.add_patch(
            Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, color=color,
                      linewidth=2))
        axis.text(x1, max(y1 - 1, 6), text, fontsize=9, color='white',
                  clip_on=True,
                  bbox=dict(facecolor=color, edgecolor='none', pad=1))
