"""Weights from the network: only where a config or a command names an address, and with a way out if it fails."""
import functools
import http.client
import os.path as osp
from urllib.parse import urlparse

import torch
from mmengine.runner import CheckpointLoader, checkpoint

from .faults import FaultError


def explain_failed_downloads():
    """Let mmengine say which weights could not be fetched, and what works without a network.

    `torchvision://`, `open-mmlab://` and the like end in an address too.
    """
    fetch = checkpoint.load_from_http
    if hasattr(fetch, '__wrapped__'):
        return

    @functools.wraps(fetch)
    def load_from_http(filename, *args, **kwargs):
        try:
            return fetch(filename, *args, **kwargs)
        except (OSError, http.client.HTTPException) as error:
            name = osp.basename(urlparse(filename).path)
            raise FaultError(
                f'checkpoint {filename} could not be fetched: {error}. Without a network give a local file in its '
                'place (the checkpoint of init_cfg, load_from, or the argument of the tool), or put a copy of it '
                f'there: {osp.join(torch.hub.get_dir(), "checkpoints", name)}') from error

    checkpoint.load_from_http = load_from_http
    CheckpointLoader.register_scheme(prefixes=('http://', 'https://'), loader=load_from_http, force=True)
