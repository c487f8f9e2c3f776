"""KSampler's list of samplers, in ComfyUI 0.30."""

_LOCAL = """
euler euler_cfg_pp euler_ancestral euler_ancestral_cfg_pp heun heunpp2 exp_heun_2_x0 exp_heun_2_x0_sde dpm_2 dpm_2_ancestral lms
dpm_fast dpmpp_2s_ancestral dpmpp_2s_ancestral_cfg_pp dpmpp_sde dpmpp_sde_gpu dpmpp_2m dpmpp_2m_cfg_pp dpmpp_2m_sde
dpmpp_2m_sde_gpu dpmpp_2m_sde_heun dpmpp_2m_sde_heun_gpu dpmpp_3m_sde dpmpp_3m_sde_gpu ddpm lcm ipndm ipndm_v deis res_multistep
res_multistep_cfg_pp res_multistep_ancestral res_multistep_ancestral_cfg_pp gradient_estimation gradient_estimation_cfg_pp er_sde
seeds_2 seeds_3 sa_solver sa_solver_pece ddim uni_pc uni_pc_bh2
"""
LOCAL = tuple(_LOCAL.split())
"""Samplers that treat every element of the latent separately, so that the workers can replay them."""

NOT_LOCAL = ("dpm_adaptive",)
"""Samplers that do not treat every element separately."""
