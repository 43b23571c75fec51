_base_ = '../retinanet_r50-sasa_fpn_1x_coco.py'

model = dict(backbone=dict(stage_with_attn=(True, True, True, False)))
