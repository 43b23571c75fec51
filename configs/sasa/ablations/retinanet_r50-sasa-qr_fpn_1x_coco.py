_base_ = '../retinanet_r50-sasa_fpn_1x_coco.py'

# logits of q . r alone, without q . k
model = dict(backbone=dict(attn_cfg=dict(use_key=False)))
