_base_ = './retinanet_r50-acmix_fpn_1x_coco.py'

model = dict(neck=dict(type='ACmixFPN'))
