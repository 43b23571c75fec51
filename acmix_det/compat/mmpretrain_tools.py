"""Run mmpretrain's own training and test scripts with acmix_det already imported.

mmengine then finds the bases of a config (`mmpretrain::...`) in every kind of installation.

Example:
    python -m acmix_det.compat.mmpretrain_tools train CONFIG
"""
import importlib.util
import runpy
import sys
from pathlib import Path

NAMES = ('train', 'test')
USAGE = 'usage: python -m acmix_det.compat.mmpretrain_tools NAME [arguments of the script]'


def find_mmpretrain_tool(name):
    """Find a script of mmpretrain, in the installed package or the checkout it is imported from.

    Args:
        name (str): 'train' or 'test'.

    Returns:
        Path: The script.

    Raises:
        ValueError: The name is another one.
        ImportError: mmpretrain is not installed.
        FileNotFoundError: mmpretrain is there without its scripts.
    """
    if name not in NAMES:
        raise ValueError(f'NAME must be one of {NAMES}, got {name!r}')
    spec = importlib.util.find_spec('mmpretrain')
    if spec is None:
        raise ImportError("mmpretrain is not installed. Get it with:\n    pip install 'mmpretrain>=1.2,<1.3'")
    package = Path(spec.origin).resolve().parent
    scripts = [folder / 'tools' / f'{name}.py' for folder in (package / '.mim', package.parent)]
    for script in scripts:
        if script.is_file():
            return script
    raise FileNotFoundError('the script of mmpretrain must be one of these files, but is not: '
                            + ', '.join(map(str, scripts)))


def main():
    name, *args = sys.argv[1:] or ['']
    try:
        script = find_mmpretrain_tool(name)
    except (ValueError, ImportError, FileNotFoundError) as error:
        sys.exit(f'{USAGE}\n{error}')
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name='__main__')


if __name__ == '__main__':
    main()
