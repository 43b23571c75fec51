"""Whole detectors on images of any size."""
import copy
import functools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.modules.batchnorm import _BatchNorm

from tests.test_fuzz.hostile import examples
from tests.test_fuzz.tiny import CASES, build, tiny_model
from tests.test_models.test_detectors import batch

lengths = st.one_of(st.integers(1, 8), st.integers(1, 97))


@functools.lru_cache(maxsize=None)
def initialised(name):
    model = build(tiny_model(name))
    model.init_weights()
    return model


def detector(name):
    """A copy: the norms of a model remember the images that they saw."""
    torch.manual_seed(0)
    return copy.deepcopy(initialised(name))


@examples(40)
@given(st.sampled_from(list(CASES)),
       st.lists(st.tuples(lengths, st.integers(1, 131)), min_size=1,
                max_size=3), st.integers(0, 2))
def test_detector_trains_and_predicts_at_any_size(name, sizes, boxes):
    model = detector(name).train()
    images, samples = batch(sizes, boxes, num_classes=3)
    for sample, (height, width) in zip(samples, sizes):
        sample.gt_instances.bboxes = torch.tensor(
            [[.1 * width, .2 * height, .9 * width, .7 * height]] * boxes
        ).reshape(-1, 4)
    last = len(sizes) * -(-images.shape[2] // 32) * -(-images.shape[3] // 32)
    for m in model.modules():
        if isinstance(m, _BatchNorm):  # no statistics of a single pixel
            m.train(last > 1)
    losses = model.loss(images, samples)
    total = sum(x if torch.is_tensor(x) else sum(x)
                for key, x in losses.items() if 'loss' in key)
    assert total.isfinite()
    total.backward()
    for key, p in model.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), key
    model.eval()
    with torch.no_grad():
        results = model.predict(*batch(sizes, boxes))
    assert len(results) == len(sizes)
    for result, (height, width) in zip(results, sizes):
        found = result.pred_instances
        assert found.scores.isfinite().all() and found.bboxes.isfinite().all()
        assert (found.labels >= 0).all() and (found.labels < 3).all()
        assert (found.bboxes >= 0).all()
        assert (found.bboxes <= torch.tensor([width, height] * 2)).all()


@examples(20)
@given(st.sampled_from(list(CASES)), st.integers(0, 3), lengths, lengths)
def test_backbone_and_neck_keep_the_sizes_of_their_strides(
        name, batch_size, height, width):
    model = detector(name).eval()
    images = torch.randn(batch_size, 3, height, width)
    with torch.no_grad():
        maps = model.extract_feat(images)
        plain = model.backbone(images)
    for x in (*maps, *plain):
        assert x.shape[0] == batch_size and x.isfinite().all()
    for index, x in zip(model.backbone.out_indices, plain):
        stride = 4 * 2**index
        assert x.shape[2:] == (-(-height // stride), -(-width // stride))
