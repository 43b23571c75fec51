_base_ = './retinanet_r50-sasa_fpn-sasa_1x_coco.py'

# float16 with loss scaling, on a GPU
optim_wrapper = dict(type='AmpOptimWrapper')
