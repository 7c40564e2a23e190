//! The peer whose memory is counted: each allocation adds to a counter, so nothing here is timed.
#[global_allocator]
static COUNTING: peers::count::Counting = peers::count::Counting;

fn main() {
    peers::run();
}
