//! A peer process serves one workload file. For each line that it reads, it runs one repetition from empty and prints
//! one JSON line, so that benchmarks/index.py can alternate between the peer and our index.
//!
//!   peer FILE
//!   apply ENGINE BATCH     apply all events; the index stays for the following queries
//!   match ENGINE PASSES    the shortest lookup that the crate offers, after one untimed pass
//!   map ENGINE PASSES      the lookup that builds a map of ranks to depths
//!   tokens ENGINE PASSES   from token ids to the best rank
//!   evict ENGINE BATCH     apply all events, timed from the first removal on
//!   pause ENGINE           apply all events, each timed separately (chain only)
//!   memory ENGINE          growth of the process by all events; valid only as the first command of a process
//!
//! ENGINE: chain (kv-index ChainIndex), crtc (dynamo ConcurrentRadixTreeCompressed), radix (dynamo RadixTree).

pub mod chain;
pub mod count;
pub mod dynamo;
pub mod workload;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use workload::Workload;

pub struct Applied {
    pub ns: f64,
    pub errors: usize,
}

/// sum: depths over all ranks found, by which engines are compared.
pub struct Scan {
    pub ns: u64,
    pub sum: u64,
}

pub trait Engine {
    fn apply(&mut self, workload: &Workload, first: usize, last: usize, batch: usize) -> Applied;
    fn scan(&mut self, query: usize) -> Scan;
    fn scan_map(&mut self, query: usize) -> Scan;
    fn scan_tokens(&mut self, tokens: &[u32], block_size: usize) -> Scan;
}

/// An empty engine with this name, for these queries.
fn engine(name: &str, workload: &Workload, queries: &[Vec<u64>]) -> Box<dyn Engine> {
    match name {
        "chain" => Box::new(chain::Chain::new(workload, queries)),
        "crtc" => Box::new(dynamo::Concurrent::new(workload, queries)),
        "radix" => Box::new(dynamo::Radix::new(queries)),
        _ => panic!("no engine {name}"),
    }
}

/// Percentile in microseconds.
fn percentile_us(sorted_ns: &[u64], share: f64) -> f64 {
    sorted_ns.get(((sorted_ns.len().max(1) - 1) as f64 * share) as usize).map_or(f64::NAN, |&ns| ns as f64 / 1000.0)
}

fn latencies(passes: usize, n: usize, mut one: impl FnMut(usize) -> Scan) -> String {
    let mut ns = Vec::with_capacity(passes * n);
    let mut sum = 0;
    for pass in 0..=passes {
        sum = 0;
        for at in 0..n {
            let scan = one(at);
            sum += scan.sum;
            if pass > 0 {
                ns.push(scan.ns);
            }
        }
    }
    ns.sort_unstable();
    let (p50, p99) = (percentile_us(&ns, 0.5), percentile_us(&ns, 0.99));
    format!("{{\"p50_us\":{p50:.4},\"p99_us\":{p99:.4},\"qsum\":{sum}}}")
}

/// Resident anonymous bytes, after the allocator has returned what it can.
fn resident_bytes() -> isize {
    unsafe { libc::malloc_trim(0) };
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("RssAnon"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<isize>().ok()).unwrap_or(0) * 1024
}

/// Events per wait for dynamo's pool; with 128, mostly the wake-up of its thread would be measured.
const POOL_EVENTS: usize = 4096;

fn batch_of(name: &str, words: &[&str]) -> usize {
    let asked = words.get(2).map_or(128, |word| word.parse().expect("a batch"));
    if name == "crtc" { asked.max(POOL_EVENTS) } else { asked }
}

fn answer(words: &[&str], workload: &Workload, resident: &mut HashMap<String, Box<dyn Engine>>) -> String {
    let (command, name) = (words[0], words[1]);
    let n_events = workload.n_events();
    match command {
        "apply" => {
            resident.remove(name);
            let mut fresh = engine(name, workload, &workload.queries);
            let done = fresh.apply(workload, 0, n_events, batch_of(name, words));
            resident.insert(name.to_string(), fresh);
            let ns_per_block = done.ns / workload.sequence.len() as f64;
            format!("{{\"ns_per_block\":{ns_per_block:.3},\"errors\":{}}}", done.errors)
        }
        "evict" => {
            let mut fresh = engine(name, workload, &workload.queries);
            let begin = workload.first_removal();
            fresh.apply(workload, 0, begin, 256);
            let done = fresh.apply(workload, begin, n_events, batch_of(name, words));
            let ns_per_event = done.ns / (n_events - begin).max(1) as f64;
            format!("{{\"ns_per_event\":{ns_per_event:.2},\"errors\":{}}}", done.errors)
        }
        "pause" => {
            assert_eq!(name, "chain", "only chain is timed event by event");
            let mut ns = chain::Chain::new(workload, &[]).pauses(workload);
            ns.sort_unstable();
            let (most, p9999) = (percentile_us(&ns, 1.0), percentile_us(&ns, 0.9999));
            format!("{{\"max_us\":{most:.2},\"p9999_us\":{p9999:.2}}}")
        }
        "memory" => {
            let (resident_before, live_before) = (resident_bytes(), count::live_bytes());
            let mut fresh = engine(name, workload, &[]);
            fresh.apply(workload, 0, n_events, 256);
            let (rss, live) = (resident_bytes() - resident_before, count::live_bytes() - live_before);
            format!("{{\"rss_bytes\":{rss},\"live_bytes\":{live}}}")
        }
        _ => {
            if !resident.contains_key(name) {
                let mut fresh = engine(name, workload, &workload.queries);
                fresh.apply(workload, 0, n_events, batch_of(name, &[]));
                resident.insert(name.to_string(), fresh);
            }
            let found = resident.get_mut(name).unwrap();
            let passes = words.get(2).map_or(1, |word| word.parse().expect("passes"));
            let n = workload.queries.len();
            match command {
                "match" => latencies(passes, n, |at| found.scan(at)),
                "map" => latencies(passes, n, |at| found.scan_map(at)),
                "tokens" => latencies(passes, workload.tokens.len(), |at| {
                    found.scan_tokens(&workload.tokens[at], workload.block_size)
                }),
                _ => panic!("no command {command}"),
            }
        }
    }
}

pub fn run() {
    let path = std::env::args().nth(1).expect("usage: peer FILE, then commands on standard input");
    let workload = Workload::load(&path);
    let mut resident = HashMap::new();
    let mut out = std::io::stdout();
    writeln!(out, "{{\"ready\":true,\"events\":{},\"blocks\":{}}}", workload.n_events(), workload.sequence.len()).unwrap();
    out.flush().unwrap();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        writeln!(out, "{}", answer(&words, &workload, &mut resident)).unwrap();
        out.flush().unwrap();
    }
}
