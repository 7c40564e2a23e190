//! kv-index's ChainIndex, with a map of blocks for each worker.
use crate::workload::{Workload, STORED};
use crate::{Applied, Engine, Scan};
use kv_index::{compute_request_content_hashes, ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};
use std::time::{Duration, Instant};

enum Event {
    Stored(Option<SequenceHash>, Vec<StoredBlock>),
    Removed(Vec<SequenceHash>),
}

pub struct Chain {
    index: ChainIndex,
    ids: Vec<u32>,
    maps: Vec<ChainBlockMap>,
    queries: Vec<Vec<ContentHash>>,
}

impl Chain {
    pub fn new(workload: &Workload, queries: &[Vec<u64>]) -> Chain {
        let index = ChainIndex::with_max_workers(workload.n_ranks.max(64));
        let ids = (0..workload.n_ranks).map(|w| index.intern_worker(&format!("w{w}")).unwrap()).collect();
        let maps = (0..workload.n_ranks).map(|_| ChainBlockMap::new()).collect();
        let queries = queries.iter().map(|q| q.iter().map(|&h| ContentHash(h)).collect()).collect();
        Chain { index, ids, maps, queries }
    }

    fn event(workload: &Workload, at: usize) -> (usize, Event) {
        let blocks = workload.blocks_of(at);
        let event = if workload.kind[at] == STORED {
            let parent = (workload.parent[at] != 0).then_some(SequenceHash(workload.parent[at]));
            let stored = blocks.map(|j| StoredBlock {
                seq_hash: SequenceHash(workload.sequence[j]),
                content_hash: ContentHash(workload.local[j]),
            });
            Event::Stored(parent, stored.collect())
        } else {
            Event::Removed(blocks.map(|j| SequenceHash(workload.sequence[j])).collect())
        };
        (workload.rank[at] as usize, event)
    }

    fn apply_one(&mut self, rank: usize, event: &Event) -> usize {
        let (id, map) = (self.ids[rank], &mut self.maps[rank]);
        match event {
            Event::Stored(parent, blocks) => self.index.apply_stored(id, blocks, *parent, map).is_err() as usize,
            Event::Removed(hashes) => {
                self.index.apply_removed(id, hashes, map);
                0
            }
        }
    }

    /// Time each event separately, without creating and freeing its struct.
    pub fn pauses(&mut self, workload: &Workload) -> Vec<u64> {
        let each = |at| {
            let (rank, event) = Chain::event(workload, at);
            let start = Instant::now();
            self.apply_one(rank, &event);
            start.elapsed().as_nanos() as u64
        };
        (0..workload.n_events()).map(each).collect()
    }
}

impl Engine for Chain {
    /// Events are borrowed, and freed outside the timed part, which is the crate's fastest use.
    fn apply(&mut self, workload: &Workload, first: usize, last: usize, batch: usize) -> Applied {
        let (mut took, mut errors) = (Duration::ZERO, 0);
        for start in (first..last).step_by(batch) {
            let events: Vec<_> = (start..last.min(start + batch)).map(|at| Chain::event(workload, at)).collect();
            let begun = Instant::now();
            for (rank, event) in &events {
                errors += self.apply_one(*rank, event);
            }
            took += begun.elapsed();
        }
        Applied { ns: took.as_nanos() as f64, errors }
    }

    /// Bare lookup: depths go to a callback, and no answer is built.
    fn scan(&mut self, query: usize) -> Scan {
        let mut sum = 0u64;
        let start = Instant::now();
        self.index.score_into(&self.queries[query], |h| h.0, false, |_, depth| sum += depth as u64);
        Scan { ns: start.elapsed().as_nanos() as u64, sum }
    }

    fn scan_map(&mut self, query: usize) -> Scan {
        let start = Instant::now();
        let found = self.index.find_matches(&self.queries[query], false);
        let ns = start.elapsed().as_nanos() as u64;
        Scan { ns, sum: found.scores.values().map(|&depth| depth as u64).sum() }
    }

    /// From tokens to the rank with the longest match.
    fn scan_tokens(&mut self, tokens: &[u32], block_size: usize) -> Scan {
        let (mut best, mut sum) = ((0u32, 0u32), 0u64);
        let start = Instant::now();
        let hashes = compute_request_content_hashes(tokens, block_size);
        self.index.score_into(&hashes, |h| h.0, false, |rank, depth| {
            sum += depth as u64;
            if depth > best.0 {
                best = (depth, rank);
            }
        });
        std::hint::black_box(best);
        Scan { ns: start.elapsed().as_nanos() as u64, sum }
    }
}
