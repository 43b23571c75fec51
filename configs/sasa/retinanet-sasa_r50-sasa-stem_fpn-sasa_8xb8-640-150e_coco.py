_base_ = './retinanet_r50-sasa-stem_fpn_8xb8-640-150e_coco.py'

model = dict(
    neck=dict(type='SASAFPN'), bbox_head=dict(type='SASARetinaHead'))
