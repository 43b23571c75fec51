_base_ = './retinanet_r50-sasa_fpn_1x_coco.py'

model = dict(neck=dict(type='SASAFPN'))
