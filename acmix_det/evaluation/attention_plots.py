"""Pictures of attention weights and of ACmix's mixing factors."""
import math
from typing import Sequence, Tuple

import numpy as np

from .attention_maps import View
from .mixing import Mix

COLORS = dict(alpha='#d1495b', beta='#30638e', ratio='#4d4d4d')


def draw_attention(view: View):
    """Draw the image with the position, then the weights of each head.

    The heads share one range of colors. They show the neighborhood and its
    surroundings; a dashed line marks its border, a cross the position.

    Args:
        view (View): See :func:`view_attention`.

    Returns:
        matplotlib.figure.Figure: To be saved with ``savefig``.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, PowerNorm
    from matplotlib.figure import Figure
    height, width = view.image.shape[:2]
    rows, cols = view.extent()
    left, top, right, bottom = view.grid.box(rows, cols)
    margin = 0.25 * max(right - left, bottom - top)
    window = ((max(left - margin, 0), min(right + margin, width)),
              (min(bottom + margin, height), max(top - margin, 0)))
    shown = view.maps[:, rows[0]:rows[1] + 1, cols[0]:cols[1] + 1]
    gray = view.image.mean(2) * 0.6 + 100  # light, to lie below colors
    # no weight is no color, so that the image shows
    colors = colormaps['YlOrRd'](np.linspace(0.2, 1, 256))
    colors[:, 3] = np.linspace(0, 0.9, 256)
    colors = ListedColormap(colors)
    # the root keeps even attention visible next to a single peak
    norm = PowerNorm(0.5, 0, np.nanmax(shown))

    count = 1 + len(shown)
    columns = math.ceil(count**0.5)
    lines = -(-count // columns)
    sides = [abs(i[1] - i[0]) for i in window]
    tall = max(sides[1] / sides[0], height / width)  # of a panel 1 wide
    figure = Figure(
        figsize=(3 * columns, (2.7 * min(tall, 2) + 0.4) * lines + 0.4),
        layout='constrained')
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes:
        axis.set_axis_off()
    whole = (0, width, height, 0)
    axes[0].imshow(view.image, extent=whole, interpolation='nearest')
    axes[0].set_title(f'x {view.position[0]}, y {view.position[1]}')
    _mark(axes[0], view, (left, top, right, bottom), 6)
    for head, (axis, weights, share) in enumerate(
            zip(axes[1:], shown, view.on_image())):
        axis.imshow(gray, 'gray', extent=whole, vmin=0, vmax=255,
                    interpolation='nearest')
        picture = axis.imshow(
            weights, colors, norm, extent=(left, right, bottom, top),
            interpolation='nearest')
        _mark(axis, view, (left, top, right, bottom))
        axis.set(xlim=window[0], ylim=window[1])
        title = f'head {head}: max {np.nanmax(weights):.2f}'
        if share < 0.995:
            title += f', {share:.0%} on the image'
        axis.set_title(title)
    figure.colorbar(picture, ax=axes.tolist(), shrink=0.6,
                    label='attention weight')
    figure.suptitle(f'{view.name}, stride {view.grid.stride}, query at row '
                    f'{view.query[0]}, column {view.query[1]}')
    return figure


def _mark(axis, view: View, box: Tuple[float, float, float, float],
          cross: float = 12) -> None:
    """Mark the position and the border of the neighborhood."""
    from matplotlib.patches import Rectangle
    height, width = view.image.shape[:2]
    left, top, right, bottom = box
    right, bottom = min(right, width), min(bottom, height)
    x, y = (i + 0.5 for i in view.position)
    # light below dark, to be seen on any ground
    for color, line, dash in (('white', 3, '-'), ('navy', 1.5, '--')):
        axis.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False,
                      color=color, linewidth=line, linestyle=dash,
                      clip_on=False))
    for color, line in (('white', cross / 3), ('blue', cross / 6)):
        axis.plot(x, y, '+', color=color, markersize=cross,
                  markeredgewidth=line)


def draw_mixing(mixes: Sequence[Mix]):
    """Draw the factors of every layer as bars, from input to output.

    Args:
        mixes (Sequence[Mix]): See :func:`mixing`.

    Returns:
        matplotlib.figure.Figure: To be saved with ``savefig``.
    """
    from matplotlib.figure import Figure
    places = np.arange(len(mixes))
    figure = Figure(
        figsize=(max(6, 1.5 + 0.45 * len(mixes)), 7), layout='constrained')
    above, below = figure.subplots(2, 1, sharex=True)
    above.bar(places - 0.2, [abs(m.alpha) for m in mixes], 0.4,
              color=COLORS['alpha'], label='|alpha|, attention')
    above.bar(places + 0.2, [abs(m.beta) for m in mixes], 0.4,
              color=COLORS['beta'], label='|beta|, convolution')
    above.set(ylabel='factor')
    figure.legend(loc='outside upper center', ncols=2)
    ratios = np.array([m.log_ratio for m in mixes])
    below.bar(places, np.where(np.isfinite(ratios), ratios, np.nan), 0.6,
              color=COLORS['ratio'])
    below.axhline(0, color='black', linewidth=1)
    below.set(ylabel='log |alpha| / |beta|',
              xlabel='above 0: more attention, below 0: more convolution')
    below.set_xticks(places, [m.name for m in mixes], rotation=90)
    for axis in (above, below):
        axis.grid(axis='y', alpha=0.3)
        axis.set_axisbelow(True)
    return figure
