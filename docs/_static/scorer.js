// Order of search results: pages that answer a question come before pages that record a decision.
// ASKED has, for each page, what people type who should find it first; .ci/site.py tries them all.
const ASKED = {
  "howto/install": "install|installation|pip|requirements|getting started",
  "howto/ddp_fsdp": "ddp|fsdp|fsdp2|fully_shard|data parallel|distributeddataparallel|torchrun",
  "howto/tensor_parallel": "tensor parallel|tensor parallelism|tp|colwiseparallel|rowwiseparallel|parallelize_module",
  "howto/context_parallel": "context parallel|ring attention|long context",
  "howto/hosts": "several hosts|multi node|multi-node|multinode|ucx|infiniband",
  "howto/collectives": "all_reduce|allreduce|all_gather|allgather|reduce_scatter|all_to_all|broadcast|barrier|collective|collectives",
  "howto/troubleshooting": "hang|hangs|hanging|slow|deadlock|stuck|timeout|timed out|faq|troubleshooting|error|errors",
  "howto/trace": "trace|flight recorder|who waits|straggler",
  "howto/compile": "compile|torch.compile|inductor",
  "howto/dtensor": "dtensor|shard|distribute_module",
  "howto/embed_cpp": "c++|cmake|find_package|pkg-config",
  "howto/gpu": "gpu|cuda|nvlink|nccl",
  "howto/migrate": "migrate|gloo|torch.distributed",
  "howto/survive": "shrink|recover|elastic|killed|fault tolerance",
  "howto/benchmark": "benchmark|bench|measure",
  "reference/commands": "command line|cli|doctor|phalanx doctor|phalanx bench|phalanx tune",
  "reference/environment": "environment variable|environment variables|environment|env",
  "reference/glossary": "glossary|terms",
  "reference/support": "support|supported|support matrix|dtype|dtypes",
  "explanation/collectives": "what does all_reduce do|reduce|gather|scatter",
  "explanation/benchmarks": "benchmarks|performance|figures|speed|latency|bandwidth",
  "explanation/comparison": "comparison|compare|mpi|mpich|open mpi|oneccl|deepspeed",
};
// Where several pages are equally good.
const FOLDERS = { howto: 8, tutorial: 8, reference: 6, explanation: 2, adr: -12 };

var Scorer = {
  score: ([docname, , , , score]) => {
    const query = new URLSearchParams(window.location.search).get("q").toLowerCase().trim();
    const asked = (ASKED[docname] || "").split("|").includes(query);
    return score + (FOLDERS[docname.split("/")[0]] || 0) + (asked ? 100 : 0);
  },
  // The values that Sphinx uses itself.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
