_base_ = './retinanet_r50-sasa_fpn-sasa_1x_coco.py'

model = dict(backbone=dict(depth=38))
