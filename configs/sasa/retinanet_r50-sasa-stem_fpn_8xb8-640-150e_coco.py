_base_ = './retinanet_r50-sasa_fpn_8xb8-640-150e_coco.py'

model = dict(backbone=dict(attn_stem=dict(num_mixtures=4)))
