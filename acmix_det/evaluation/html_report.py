"""The comparison as one HTML file that needs nothing else."""
import base64
from pathlib import Path
from typing import NamedTuple, Optional, Sequence, Tuple

TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; color: #222;
  background: #fff; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; }
th:first-child, td:first-child, table.text th, table.text td {
  text-align: left; }
table.text td { white-space: normal; overflow-wrap: anywhere;
  min-width: 6rem; vertical-align: top; }
tbody tr:nth-child(odd) { background: #f6f7f9; }
figure { margin: 0 0 1rem; }
figure img { max-width: 100%; height: auto; }
figure.wide img { max-width: none; width: max(100%, {{ width }}px); }
figcaption, .notes { color: #555; font-size: .9rem; }
.plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% macro grid(header, rows, kind='') %}
<div class="wide"><table class="{{ kind }}">
<thead><tr>{% for x in header %}<th scope="col">{{ x }}</th>{% endfor %}\
</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for x in row %}<td>{{ x }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endmacro %}
{% macro picture(figure, kind='') %}
<figure class="{{ kind }}"><img alt="{{ figure.caption }}" \
src="data:image/png;base64,{{ figure.data }}">
<figcaption>{{ figure.caption }}</figcaption></figure>
{% endmacro %}
<h2>Results</h2>
{{ grid(*results) }}
<ul class="notes">
{% for note in notes %}<li>{{ note }}</li>
{% endfor %}
</ul>
<h2>What was compared</h2>
{{ grid(*sources, kind='text') }}
{% if plots %}
<h2>Plots</h2>
<div class="plots">
{% for figure in plots %}{{ picture(figure) }}{% endfor %}
</div>
{% endif %}
{% if classes[1] %}
<h2>AP by class</h2>
{% if class_plot %}{{ picture(class_plot) }}{% endif %}
{{ grid(*classes) }}
{% endif %}
{% if detections %}
<h2>Detections</h2>
{{ picture(detections, 'wide') }}
{% endif %}
{% if diffs %}
<h2>Configs</h2>
{% for name, rows, left_out in diffs %}
<h3>{{ name }}</h3>
{% if rows %}
{{ grid(['setting', 'baseline', 'here'], rows, kind='text') }}
{% if left_out %}
<p class="notes">and {{ left_out }} more settings</p>
{% endif %}
{% else %}<p>The same settings as the baseline.</p>{% endif %}
{% endfor %}
{% endif %}
<h2>Versions</h2>
{{ grid(['of this report', ''], versions, kind='text') }}
</body>
</html>
"""

Grid = Tuple[Sequence[str], Sequence[Sequence[str]]]


class Picture(NamedTuple):
    """A PNG file and what it shows."""
    path: Path
    caption: str

    @property
    def data(self) -> str:
        return base64.b64encode(self.path.read_bytes()).decode()


def render(title: str, results: Grid, notes: Sequence[str], sources: Grid,
           versions: Sequence[Tuple[str, str]], plots: Sequence[Picture] = (),
           classes: Grid = ((), ()), class_plot: Optional[Picture] = None,
           detections: Optional[Picture] = None, width: int = 0,
           diffs: Sequence[Tuple[str, Sequence, int]] = ()) -> str:
    """Fill the report; every text is escaped.

    Args:
        title (str): Its headline.
        results (tuple): Header and rows of the main table.
        notes (Sequence[str]): What a reader of the table must know.
        sources (tuple): Header and rows of what was compared.
        versions (Sequence[tuple]): Names and versions.
        plots (Sequence[Picture]): Plots of whole runs.
        classes (tuple): Header and rows of the AP by class.
        class_plot (Picture | None): Its plot.
        detections (Picture | None): Detections side by side.
        width (int): Pixels below which the detections do not shrink.
        diffs (Sequence[tuple]): Model, rows of its config's differences,
            number of differences left out.

    Returns:
        str: HTML.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError('the report needs Jinja2, which is not installed: '
                          "pip install 'acmix_det[digits]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        title=title, results=results, notes=notes, sources=sources,
        versions=versions, plots=plots, classes=classes,
        class_plot=class_plot, detections=detections, width=width,
        diffs=diffs)
