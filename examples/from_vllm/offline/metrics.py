"""The metrics that Prometheus would see, from inside the program."""

from vllm import LLM, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

parser = FlexibleArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
llm = LLM(model=parser.parse_args().model, disable_log_stats=False)
llm.generate(["Hello", "Prefix caching is", "The scheduler"], SamplingParams(temperature=0.8, max_tokens=10))

for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(f"{metric.name} (histogram) sum = {metric.sum}, count = {metric.count}")
        for bucket, value in metric.buckets.items():
            print(f"    {bucket} = {value}")
