"""An engine that gives its memory to others for a while."""

from vllm import LLM, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
llm = LLM(model=parser.parse_args().model, enable_sleep_mode=True, gpu_memory_utilization=0.5)

params = SamplingParams(temperature=0, max_tokens=16)
before = llm.generate("What is prefix caching?", params)[0].outputs[0].text
for level in (1, 2):
    llm.sleep(level=level)
    print(f"level {level}, asleep:", llm.llm_engine.is_sleeping())
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    after = llm.generate("What is prefix caching?", params)[0].outputs[0].text
    print(f"level {level}, the same text:", before == after)
