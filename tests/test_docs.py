"""The texts: their links, their code, and that both languages say the same."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'),
                *ROOT.glob('configs/*/README.md')])


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = page.read_text('utf-8')
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        if target.startswith(('http:', 'https:', '#')):
            continue
        path, _, anchor = target.partition('#')
        linked = page.parent / path
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r'^#+ (.+)$', linked.read_text('utf-8'), re.M)
            slugs = [re.sub(r'[^\w\- ]', '', t.lower()).replace(' ', '-')
                     for t in titles]
            assert anchor in slugs, target


def test_layer_of_the_docs_runs(capsys):
    text = (ROOT / 'docs/how_the_swap_works.md').read_text('utf-8')
    code, = re.findall(r'```python\n(.*?)```', text, re.S)
    exec(code, {})
    assert capsys.readouterr().out.startswith('[(1, 256, 16, 24), ')


def test_model_zoo_has_every_detector():
    text = (ROOT / 'docs/model_zoo.md').read_text('utf-8')
    linked = set(re.findall(r'\.\./(configs/[\w/.+-]+\.py)', text))
    shipped = {
        name(path) for path in (ROOT / 'configs').rglob('*.py')
        if not {'_base_', 'pretrain'} & {*path.parts}
        and 'custom-data' not in path.name
    }
    assert linked == shipped


def test_both_languages_have_the_same_numbers_and_commands():
    english, chinese = ((ROOT / f'README{x}.md').read_text('utf-8')
                        for x in ('', '_zh-CN'))
    for pattern in (r'(?<![\d.])0\.\d{3}\b', r'^(?:python|torchrun|srun).*',
                    r'^[+-][ \w].*=.*$'):
        found = [re.findall(pattern, x, re.M) for x in (english, chinese)]
        assert sorted(set(found[0])) == sorted(set(found[1])), pattern
