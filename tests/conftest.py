import pytest
import torch
from hypothesis import HealthCheck, settings

import acmix_det  # noqa: F401  Without compiled ops mmcv.ops imports only after this.

# The same examples everywhere, and no time limit on a busy machine.
settings.register_profile('acmix_det', deadline=None, derandomize=True)
# --hypothesis-profile long: other examples every time, and many more.
settings.register_profile(
    'long', deadline=None, max_examples=5000, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow])
settings.load_profile('acmix_det')


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker('gpu'):
            item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
