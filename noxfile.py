"""Run the tests with the oldest and with the newest packages that setup.py admits.

    pip install nox
    nox                         # everything; about 5 minutes of tests in each session, on two cores
    nox -s "tests(oldest)" -- tests/test_ops
    nox -s mmcv -- WHEEL        # with compiled mmcv ops, from a wheel that you have

Each session makes a virtual environment of its own and installs the package there.
"""
import shutil
from pathlib import Path

import nox

nox.options.sessions = ['tests', 'wheel']
nox.options.error_on_missing_interpreters = True

EXTRAS = '[lite,digits,pretrain,test]'
OLDEST = ['torch==2.6.0', 'torchvision==0.21.0', 'numpy==1.26.0', 'pycocotools==2.0.7', 'mmengine==0.10.7', 'mmdet==3.3.0']
NEWEST = []  # what pip chooses
CHECK_INSTALLED = """
import acmix_det
from acmix_det.ops import cpu_backend
assert 'site-packages' in acmix_det.__file__, acmix_det.__file__
assert cpu_backend._load()[1] is None, cpu_backend._load()[1]
"""


def run_tests(session, default=('-n', 'auto', '--dist', 'worksteal')):
    session.run('python', '-c', 'import numpy, torch, mmcv; print(torch.__version__, numpy.__version__, mmcv.__version__)')
    session.run('python', '-m', 'pytest', *(session.posargs or default), env=dict(OMP_NUM_THREADS='1'))


@nox.session
@nox.parametrize('python, packages', [('3.10', OLDEST), ('3.13', NEWEST)], ids=['oldest', 'newest'])
def tests(session, packages):
    """The whole suite, from a checkout."""
    session.install('-e', f'.{EXTRAS}', *packages)
    run_tests(session)


@nox.session
def mmcv(session):
    """The whole suite with compiled mmcv, from the wheel that is named or one that pip finds."""
    wheel = session.posargs.pop(0) if session.posargs else 'mmcv==2.1.0'
    found = session.run('python', '-m', 'pip', 'install', '--only-binary', 'mmcv', wheel, success_codes=[0, 1], silent=True)
    if 'No matching distribution' in found:
        session.skip('pip finds no wheel of mmcv for this machine; name one: nox -s mmcv -- WHEEL')
    session.install('-e', '.[digits,pretrain,test]')
    session.run('python', '-c', 'import mmcv._ext')
    run_tests(session)


@nox.session
def wheel(session):
    """Install the wheel, then test it away from the checkout, with the tools and configs that it carries."""
    folder = Path(session.create_tmp())
    session.run('python', '-m', 'pip', 'wheel', '.', '--no-deps', '--wheel-dir', str(folder))
    session.install(f'acmix_det{EXTRAS} @ {next(folder.glob("acmix_det-*.whl")).resolve().as_uri()}')
    shutil.copytree('tests', folder / 'tests', dirs_exist_ok=True)
    session.chdir(folder)
    session.run('python', '-c', CHECK_INSTALLED)
    session.run('python', '-m', 'pytest', '-q', 'tests/test_ops', 'tests/test_layers', *session.posargs)
    mim = next(Path(session.virtualenv.location).resolve().glob('lib/*/site-packages/acmix_det/.mim'))
    session.run('python', f'{mim}/tools/make_digits.py', '--num-train', '16', '--num-val', '4')
    session.run('python', f'{mim}/tools/train.py', f'{mim}/configs/digits/retinanet_r18-sasa_fpn-sasa_digits.py',
                '--cfg-options', 'train_cfg.max_epochs=1')
