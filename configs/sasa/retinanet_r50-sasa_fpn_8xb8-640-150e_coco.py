_base_ = './retinanet_r50_fpn_8xb8-640-150e_coco.py'

model = dict(backbone=dict(type='SASAResNet'))
