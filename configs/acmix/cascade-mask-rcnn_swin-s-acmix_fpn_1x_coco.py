_base_ = './cascade-mask-rcnn_swin-t-acmix_fpn_1x_coco.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_small_patch4_window7_224.pth'  # noqa
model = dict(
    backbone=dict(
        depths=[2, 2, 18, 2], init_cfg=dict(checkpoint=pretrained)))
