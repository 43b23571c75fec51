_base_ = 'mmdet::swin/retinanet_swin-t-p4-w7_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# Starts as the ImageNet Swin-T of the base, its attention as it was and the
# convolution path at zero weight. No address of released Swin-ACmix weights is
# known here; if you have them, convert them by tools/convert_checkpoint.py and
# set init_cfg=dict(type='Pretrained', checkpoint=...).
model = dict(
    backbone=dict(
        type='ACmixSwinTransformer', init_cfg=dict(type='WarmStart')))
