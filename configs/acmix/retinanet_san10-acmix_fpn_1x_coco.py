_base_ = './retinanet_san10_fpn_1x_coco.py'

model = dict(backbone=dict(type='ACmixSAN'))
