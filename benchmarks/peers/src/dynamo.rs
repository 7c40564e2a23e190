//! dynamo-kv-router's RadixTree, and its concurrent compressed tree with the crate's own pool of one thread.
use crate::workload::{Workload, STORED};
use crate::{Applied, Engine, Scan};
use dynamo_kv_router::indexer::{SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::*;
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};
use std::time::{Duration, Instant};

fn event(workload: &Workload, at: usize) -> RouterEvent {
    let blocks = workload.blocks_of(at);
    let data = if workload.kind[at] == STORED {
        KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: (workload.parent[at] != 0).then_some(ExternalSequenceBlockHash(workload.parent[at])),
            start_position: None,
            blocks: blocks
                .map(|j| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(workload.sequence[j]),
                    tokens_hash: LocalBlockHash(workload.local[j]),
                    mm_extra_info: None,
                })
                .collect(),
        })
    } else {
        let block_hashes = blocks.map(|j| ExternalSequenceBlockHash(workload.sequence[j])).collect();
        KvCacheEventData::Removed(KvCacheRemoveData { block_hashes })
    };
    RouterEvent::new(workload.rank[at] as u64, KvCacheEvent { event_id: at as u64, data, dp_rank: 0 })
}

fn hashes_of(queries: &[Vec<u64>]) -> Vec<Vec<LocalBlockHash>> {
    queries.iter().map(|q| q.iter().map(|&h| LocalBlockHash(h)).collect()).collect()
}

fn total(found: &OverlapScores) -> u64 {
    found.scores.values().map(|&depth| depth as u64).sum()
}

pub struct Radix {
    tree: RadixTree,
    queries: Vec<Vec<LocalBlockHash>>,
}

impl Radix {
    pub fn new(queries: &[Vec<u64>]) -> Radix {
        Radix { tree: RadixTree::new(), queries: hashes_of(queries) }
    }
}

impl Engine for Radix {
    fn apply(&mut self, workload: &Workload, first: usize, last: usize, batch: usize) -> Applied {
        let (mut took, mut errors) = (Duration::ZERO, 0);
        for start in (first..last).step_by(batch) {
            let events: Vec<_> = (start..last.min(start + batch)).map(|at| event(workload, at)).collect();
            let begun = Instant::now();
            for event in events {
                errors += self.tree.apply_event(event).is_err() as usize;
            }
            took += begun.elapsed();
        }
        Applied { ns: took.as_nanos() as f64, errors }
    }

    fn scan(&mut self, query: usize) -> Scan {
        let hashes = self.queries[query].clone(); // the crate takes the request's hashes by value
        let start = Instant::now();
        let found = self.tree.find_matches(hashes, false);
        Scan { ns: start.elapsed().as_nanos() as u64, sum: total(&found) }
    }

    fn scan_map(&mut self, query: usize) -> Scan {
        self.scan(query)
    }

    fn scan_tokens(&mut self, tokens: &[u32], block_size: usize) -> Scan {
        let start = Instant::now();
        let hashes = compute_block_hash_for_seq(tokens, block_size as u32, BlockHashOptions::default());
        let found = self.tree.find_matches(hashes, false);
        std::hint::black_box(found.scores.iter().max_by_key(|(_, depth)| **depth));
        Scan { ns: start.elapsed().as_nanos() as u64, sum: total(&found) }
    }
}

pub struct Concurrent {
    pool: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: tokio::runtime::Runtime,
    queries: Vec<Vec<LocalBlockHash>>,
}

impl Concurrent {
    pub fn new(workload: &Workload, queries: &[Vec<u64>]) -> Concurrent {
        Concurrent {
            pool: ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, workload.block_size as u32),
            runtime: tokio::runtime::Builder::new_current_thread().build().unwrap(),
            queries: hashes_of(queries),
        }
    }
}

impl Engine for Concurrent {
    /// Enqueue a batch, then wait until it is applied; without waiting, only the queue would be measured.
    fn apply(&mut self, workload: &Workload, first: usize, last: usize, batch: usize) -> Applied {
        let (mut took, mut errors) = (Duration::ZERO, 0);
        for start in (first..last).step_by(batch) {
            let events: Vec<_> = (start..last.min(start + batch)).map(|at| event(workload, at)).collect();
            let begun = Instant::now();
            for event in events {
                errors += self.pool.enqueue_event(event).is_err() as usize;
            }
            self.runtime.block_on(self.pool.flush_and_wait()).unwrap();
            took += begun.elapsed();
        }
        Applied { ns: took.as_nanos() as f64, errors }
    }

    fn scan(&mut self, query: usize) -> Scan {
        let tree = self.pool.backend();
        let start = Instant::now();
        let found = tree.find_matches(&self.queries[query], false);
        Scan { ns: start.elapsed().as_nanos() as u64, sum: total(&found) }
    }

    fn scan_map(&mut self, query: usize) -> Scan {
        self.scan(query)
    }

    fn scan_tokens(&mut self, tokens: &[u32], block_size: usize) -> Scan {
        let tree = self.pool.backend();
        let start = Instant::now();
        let hashes = compute_block_hash_for_seq(tokens, block_size as u32, BlockHashOptions::default());
        let found = tree.find_matches(&hashes, false);
        std::hint::black_box(found.scores.iter().max_by_key(|(_, depth)| **depth));
        Scan { ns: start.elapsed().as_nanos() as u64, sum: total(&found) }
    }
}
