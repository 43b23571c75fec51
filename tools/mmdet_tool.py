"""Run any other script of mmdet after `import acmix_det`.

Example:
    python tools/mmdet_tool.py analysis_tools/browse_dataset CONFIG --output-dir pictures --not-show
"""
import sys

from acmix_det.compat.mmdet_tools import available_tools, find_mmdet_tool, run_mmdet_tool

USAGE = 'usage: python tools/mmdet_tool.py NAME [arguments of the script]'


def main():
    name, *args = sys.argv[1:] or ['']
    if name in ('-h', '--help'):
        print(USAGE, 'NAME is one of:', *available_tools(), sep='\n  ')
        return
    if not name:
        sys.exit('\n  '.join([USAGE, 'NAME is missing. It is one of:', *available_tools()]))
    try:
        find_mmdet_tool(name)
    except ValueError as error:
        sys.exit(f'{USAGE}\n{error}')
    run_mmdet_tool(name, args)


if __name__ == '__main__':
    main()
