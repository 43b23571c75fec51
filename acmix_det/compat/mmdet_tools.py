"""Run mmdet's own scripts with acmix_det already imported.

Several of them import compiled mmcv ops at the top, before the `custom_imports` of a config run.
"""
import runpy
import sys
from pathlib import Path

import mmdet
import torch

from .checkpoint_loader import checkpoint_globals


def mmdet_tools_dir():
    """Return the tools folder of the installed mmdet, or of the checkout it is imported from.

    Raises:
        FileNotFoundError: There is neither.
    """
    package = Path(mmdet.__file__).resolve().parent
    folders = (package / '.mim' / 'tools', package.parent / 'tools')
    for folder in folders:
        if (folder / 'train.py').is_file() and (folder / 'test.py').is_file():
            return folder
    raise FileNotFoundError('the scripts of mmdet must be in one of these folders, but are not: '
                            + ', '.join(map(str, folders)))


def available_tools():
    """List mmdet's scripts by path without suffix, for example `'analysis_tools/get_flops'`."""
    folder = mmdet_tools_dir()
    return sorted(path.relative_to(folder).with_suffix('').as_posix() for path in folder.rglob('*.py'))


def find_mmdet_tool(name):
    """Find a script of mmdet.

    Args:
        name (str): Path below mmdet's tools folder or its last part, with or without `.py`.

    Returns:
        Path: The script.

    Raises:
        ValueError: No script, or more than one, has that name.
    """
    tool = name[:-len('.py')] if name.endswith('.py') else name
    tools = available_tools()
    matches = [tool] if tool in tools else [path for path in tools if path.split('/')[-1] == tool]
    if len(matches) != 1:
        raise ValueError(f'name must be one tool of mmdet, got {name!r}. There are:\n  '
                         + '\n  '.join(matches or tools))
    return mmdet_tools_dir() / f'{matches[0]}.py'


def run_mmdet_tool(name, args):
    """Run a script as if it had been started by its path.

    Args:
        name (str): As in `find_mmdet_tool`.
        args (list[str]): Arguments of the script.
    """
    script = find_mmdet_tool(name)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    # Some scripts call torch.load themselves.
    with torch.serialization.safe_globals(checkpoint_globals()):
        runpy.run_path(str(script), run_name='__main__')
