_base_ = '../retinanet_r50-sasa_fpn_1x_coco.py'

# values that do not depend on the place in the block
model = dict(backbone=dict(attn_stem=dict(num_mixtures=1)))
