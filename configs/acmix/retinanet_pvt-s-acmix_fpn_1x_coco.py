_base_ = 'mmdet::pvt/retinanet_pvt-s_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# Starts as the ImageNet PVT-S of the base, see the config of PVT-T.
model = dict(
    backbone=dict(
        type='ACmixPyramidVisionTransformer', init_cfg=dict(type='WarmStart')))
