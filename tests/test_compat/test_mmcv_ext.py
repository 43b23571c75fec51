import sys
from types import ModuleType

import mmcv
import pytest
import torch
import torchvision
from mmcv.ops import nms, roi_align, sigmoid_focal_loss
from mmengine.config import Config
from mmengine.utils.dl_utils.misc import mmcv_full_available

from acmix_det.compat import mmcv_ext
from acmix_det.compat.mmcv_ext import build_stand_in, provide_mmcv_ext

stand_in_only = pytest.mark.skipif(sys.modules['mmcv._ext'].nms is not mmcv_ext.nms,
                                   reason='mmcv has compiled ops here')


def greedy_nms(boxes, scores, iou_threshold, offset):
    """Non-maximum suppression in plain Python."""
    def area(x1, y1, x2, y2):
        return max(x2 - x1 + offset, 0) * max(y2 - y1 + offset, 0)

    def iou(a, b):
        common = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
        return common / (area(*a) + area(*b) - common)

    boxes, kept = boxes.tolist(), []
    for index in scores.argsort(descending=True).tolist():
        if all(iou(boxes[index], boxes[other]) <= iou_threshold for other in kept):
            kept.append(index)
    return kept


def random_boxes(n, size=40):
    corner = torch.rand(n, 2) * size
    return torch.cat([corner, corner + 1 + torch.rand(n, 2) * size / 2], dim=1)


@pytest.mark.parametrize('offset', [0, 1])
@pytest.mark.parametrize('iou_threshold', [0.0, 0.3, 0.5, 0.9])
def test_nms_keeps_what_the_definition_keeps(offset, iou_threshold):
    boxes, scores = random_boxes(200), torch.rand(200)
    kept = nms(boxes, scores, iou_threshold, offset)[1]
    assert kept.tolist() == greedy_nms(boxes, scores, iou_threshold, offset)


def test_nms_offset_decides_between_boxes_that_touch():
    boxes = torch.tensor([[0., 0., 1., 1.], [1., 0., 2., 1.]])  # IoU 0, with offset 2 / 6
    scores = torch.tensor([0.9, 0.8])
    assert nms(boxes, scores, 0.3, offset=0)[1].tolist() == [0, 1]
    assert nms(boxes, scores, 0.3, offset=1)[1].tolist() == [0]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_nms_takes_half_types(dtype):
    boxes, scores = random_boxes(50).to(dtype), torch.rand(50).to(dtype)
    kept = build_stand_in().nms(boxes, scores, iou_threshold=0.5, offset=0)
    assert kept.tolist() == torchvision.ops.nms(boxes.float(), scores.float(), 0.5).tolist()


def test_nms_of_no_boxes_is_empty():
    kept = build_stand_in().nms(torch.zeros(0, 4), torch.zeros(0), iou_threshold=0.5, offset=0)
    assert kept.shape == (0, ) and kept.dtype == torch.long


ROIS = torch.tensor([[0., 1.3, 0.7, 9.1, 6.2], [1., 0., 0., 4., 8.], [0., 5., 2., 5.4, 2.3]])


@pytest.mark.parametrize('aligned', [True, False], ids=['aligned', 'legacy'])
@pytest.mark.parametrize('sampling_ratio', [0, 2])
@pytest.mark.parametrize('scale', [1.0, 0.25])
def test_roi_align_and_its_gradient_equal_torchvision(aligned, sampling_ratio, scale):
    x = torch.rand(2, 3, 7, 10, dtype=torch.double, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    rois = ROIS.double()
    ours = roi_align(x, rois, (3, 2), scale, sampling_ratio, 'avg', aligned)
    expected = torchvision.ops.roi_align(y, rois, (3, 2), scale, sampling_ratio, aligned)
    torch.testing.assert_close(ours, expected)
    grad = torch.rand_like(ours)
    ours.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad.abs().sum() > 0


def test_roi_align_passes_gradcheck():
    x = torch.rand(2, 2, 5, 6, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: roi_align(x, ROIS.double(), 2, 0.5, 0, 'avg', True), x, nondet_tol=1e-12)


def test_roi_align_averages_a_constant_ramp_to_the_centre_of_the_roi():
    ramp = torch.arange(12.).expand(1, 1, 12, 12).contiguous()
    rois = torch.tensor([[0., 2., 2., 8., 8.]])
    # Pixel centres are at x + 0.5: the middle of 2..8 is pixel 4.5.
    assert roi_align(ramp, rois, 1, 1.0, 0, 'avg', True).item() == pytest.approx(4.5)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_roi_align_takes_half_types(dtype):
    x = torch.rand(2, 3, 7, 10).to(dtype)
    out = roi_align_forward(x, ROIS.to(dtype))
    expected = torchvision.ops.roi_align(x.float(), ROIS.to(dtype).float(), (2, 2))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)


def roi_align_forward(x, rois):
    out = x.new_zeros(rois.size(0), x.size(1), 2, 2)
    nothing = x.new_zeros(0)
    build_stand_in().roi_align_forward(
        x, rois, out, nothing, nothing, aligned_height=2, aligned_width=2, spatial_scale=1.0,
        sampling_ratio=-1, pool_mode=1, aligned=False)
    return out


@stand_in_only
def test_maximum_roi_align_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"roi_align with pool_mode='max' needs compiled"):
        roi_align(torch.rand(1, 1, 4, 4), ROIS[:1], 2, 1.0, 0, 'max', True)


def focal_loss_by_autograd(x, target, gamma, alpha):
    p = x.sigmoid()
    one_hot = torch.nn.functional.one_hot(target, x.size(1) + 1)[:, :-1]
    return -(one_hot * alpha * (1 - p)**gamma * p.log()
             + (1 - one_hot) * (1 - alpha) * p**gamma * (1 - p).log())


@pytest.mark.parametrize('gamma, alpha', [(2.0, 0.25), (1.5, 0.6)])
def test_focal_loss_and_its_gradient_equal_the_formula(gamma, alpha):
    x = torch.randn(6, 4, dtype=torch.double)
    target = torch.tensor([0, 3, 4, 1, 4, 2])  # 4 is the background
    ext = build_stand_in()
    loss, grad = torch.zeros_like(x), torch.zeros_like(x)
    ext.sigmoid_focal_loss_forward(x, target, x.new_empty(0), loss, gamma=gamma, alpha=alpha)
    ext.sigmoid_focal_loss_backward(x, target, x.new_empty(0), grad, gamma=gamma, alpha=alpha)
    x.requires_grad_()
    expected = focal_loss_by_autograd(x, target, gamma, alpha)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])


@stand_in_only
def test_focal_loss_of_mmcv_reduces_and_differentiates():
    x = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 3])
    loss = sigmoid_focal_loss(x, target, 2.0, 0.25, None, 'sum')
    torch.testing.assert_close(loss, focal_loss_by_autograd(x, target, 2.0, 0.25).sum())
    assert torch.autograd.gradcheck(
        lambda x: sigmoid_focal_loss(x, target, 2.0, 0.25, None, 'sum'), x)


def test_focal_loss_stays_finite_for_huge_logits():
    x = torch.tensor([[-200., 200.], [200., -200.]])
    out = torch.zeros_like(x)
    build_stand_in().sigmoid_focal_loss_forward(
        x, torch.tensor([0, 1]), x.new_empty(0), out, gamma=2.0, alpha=0.25)
    torch.testing.assert_close(out, torch.tensor([[50., 150.], [150., 50.]]))


@stand_in_only
def test_class_weights_of_the_focal_loss_are_refused_by_name():
    with pytest.raises(NotImplementedError, match='sigmoid_focal_loss with class weights needs compiled'):
        sigmoid_focal_loss(torch.rand(2, 3), torch.tensor([0, 1]), 2.0, 0.25, torch.ones(3), 'none')


def test_any_other_op_raises_its_name_and_the_cure_only_when_called():
    op = build_stand_in().deform_conv_forward
    with pytest.raises(NotImplementedError,
                       match=r'(?s)mmcv op deform_conv_forward needs compiled.*MMCV_WITH_OPS=1 pip install'):
        op(1, x=2)


def test_stand_in_has_no_invented_dunder_attributes():
    with pytest.raises(AttributeError, match='__path__'):
        build_stand_in().__path__


@stand_in_only
def test_host_knows_that_there_are_no_compiled_ops():
    assert sys.modules['mmcv._ext'] is mmcv._ext
    assert mmcv._ext.__spec__.name == 'mmcv._ext'
    assert mmcv_full_available() is False


@pytest.fixture
def without_ext(monkeypatch, tmp_path):
    """An mmcv whose folder list ends with an empty one, and no `mmcv._ext` in memory."""
    monkeypatch.delitem(sys.modules, 'mmcv._ext', raising=False)
    monkeypatch.setattr(mmcv, '_ext', None, raising=False)
    monkeypatch.setattr(mmcv, '__path__', [str(tmp_path)])
    return tmp_path


def test_stand_in_is_provided_when_ops_are_missing(without_ext):
    provide_mmcv_ext()
    assert sys.modules['mmcv._ext'].nms is mmcv_ext.nms


def test_compiled_ops_are_preferred(without_ext):
    (without_ext / '_ext.py').write_text("nms = 'compiled'\n")
    provide_mmcv_ext()
    assert sys.modules['mmcv._ext'].nms == 'compiled'


def test_ops_that_are_loaded_already_stay(without_ext, monkeypatch):
    loaded = ModuleType('mmcv._ext')
    monkeypatch.setitem(sys.modules, 'mmcv._ext', loaded)
    provide_mmcv_ext()
    assert sys.modules['mmcv._ext'] is loaded


def test_compiled_ops_that_do_not_import_are_reported(without_ext):
    (without_ext / '_ext.py').write_text("raise ImportError('undefined symbol: _ZN2at4_ops5zeros')\n")
    with pytest.raises(ImportError) as caught:
        provide_mmcv_ext()
    message = str(caught.value)
    assert caught.value.name == 'mmcv._ext'
    assert 'undefined symbol: _ZN2at4_ops5zeros' in message
    assert f'mmcv {mmcv.__version__}' in message and f'torch {torch.__version__}' in message
    assert 'MMCV_WITH_OPS=1 pip install' in message and 'mmcv-lite' in message
    assert 'mmcv._ext' not in sys.modules


def small_detector(name):
    from mmdet.registry import MODELS
    path = Config._get_cfg_path(f'mmdet::{name}', '')[0]
    model = Config.fromfile(path).model
    model.backbone.update(depth=18, base_channels=8, stem_channels=8, init_cfg=None)
    model.neck.update(in_channels=[8, 16, 32, 64], out_channels=16)
    for head in [model.get('bbox_head'), model.get('rpn_head')]:
        if head:
            head.update(in_channels=16, feat_channels=16)
    if 'roi_head' in model:
        model.roi_head.bbox_roi_extractor.out_channels = 16
        model.roi_head.bbox_head.update(in_channels=16, fc_out_channels=32)
        model.roi_head.mask_roi_extractor.out_channels = 16
        model.roi_head.mask_head.update(in_channels=16, conv_out_channels=16, num_convs=1)
    return MODELS.build(model)


@pytest.mark.parametrize('name', ['retinanet/retinanet_r50_fpn_1x_coco.py',
                                  'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'],
                         ids=['retinanet', 'mask-rcnn'])
def test_detector_trains_a_step_and_predicts(name):
    from mmdet.testing import demo_mm_inputs
    from mmdet.utils import register_all_modules
    register_all_modules()
    model = small_detector(name)
    batch = demo_mm_inputs(2, [[3, 96, 128], [3, 100, 90]], num_items=[3, 1],
                           with_mask='mask' in name)
    data = model.data_preprocessor(batch, True)
    losses = model(**data, mode='loss')
    loss = model.parse_losses(losses)[0]
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.eval()
    with torch.no_grad():
        results = model(**model.data_preprocessor(batch, False), mode='predict')
    assert len(results) == 2 and all('bboxes' in result.pred_instances for result in results)
