_base_ = '../sasa/retinanet_r50-scratch_fpn_1x_coco.py'

model = dict(backbone=dict(type='ACmixResNet'))
