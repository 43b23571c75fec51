_base_ = './retinanet_r50-acmix_fpn-acmix_1x_coco.py'

# the towers; the predictors stay convolutions
model = dict(bbox_head=dict(conv_cfg=dict(type='ACmix', num_heads=4)))
