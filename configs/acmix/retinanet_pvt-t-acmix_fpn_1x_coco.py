_base_ = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# Starts as the ImageNet PVT-T of the base, its attention as it was and the
# convolution path at zero weight. No weights of ACmix PVTs were released.
model = dict(
    backbone=dict(
        type='ACmixPyramidVisionTransformer', init_cfg=dict(type='WarmStart')))
