_base_ = './retinanet_r50-acmix_fpn-acmix_1x_coco.py'

model = dict(backbone=dict(depth=101))
