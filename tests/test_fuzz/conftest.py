import logging

import pytest


@pytest.fixture(autouse=True, scope='module')
def quiet():
    """Without a line for every start value of every detector."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)
