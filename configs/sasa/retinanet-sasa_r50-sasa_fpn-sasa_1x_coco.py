_base_ = './retinanet_r50-sasa_fpn-sasa_1x_coco.py'

model = dict(bbox_head=dict(type='SASARetinaHead'))
