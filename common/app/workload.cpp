#include "common/app/workload.h"

#include <array>

namespace common {
namespace {

// Three prompts begin with this text; from stage 6 on, its K and V are stored once. It is the beginning of "Puss in
// Boots" as told by the Brothers Grimm in 1812. The last prompt is the beginning of Andersen's "The Wild Swans".
const std::string kOpening =
    "There was once upon a time a miller who had three sons, a mill, an ass, and a cat. The sons had to grind the "
    "corn, the ass to fetch the grain and carry the meal, and the cat to catch the mice. When the miller died, the "
    "three sons divided the inheritance. The eldest took the mill, the second the ass, and the third got the cat, for "
    "there was nothing else left for him. Then he was sad, and said to himself, \"After all, I have got the worst of "
    "it.\" ";

// Chosen so that no greedy choice is nearly tied (tests/common/test_llama.cpp measures this): the text is the same in
// whatever order floats are added. The first five prompts are also in tests/golden/golden_greedy.json.
std::array<WorkloadItem, 12> make_workload() {
  return {{
      {"The old woman opened the door and", 64},
      {"A wolf met a little girl in the wood and", 64},
      {"The lion said to the fox,", 64},
      {"\"If you will give me your daughter,\" said the dragon,", 64},
      {"Once upon a time there was a poor fisherman who lived by the sea", 64},
      {kOpening + "The next morning he met an old man, who said,", 96},
      {kOpening + "So he went to the king, and", 48},
      {kOpening + "The cat answered,", 32},
      {"The king had a garden, and in the garden stood a tree that bore golden apples. Every night one apple was "
       "stolen. At last the king said to his three sons,",
       96},
      {"\"Who is there?\" cried the giant.", 96},
      {"One day the king went out hunting and", 16},
      {"Far away, where the swallows fly when we have winter, dwelt a king who had eleven sons and one daughter. The "
       "eleven brothers were princes, and each went to school with a star on his breast and a sword by his side. They "
       "wrote with diamond pencils upon golden slates, and learnt by heart just as well as they read: one could see "
       "directly that they were princes. Their sister sat upon a little stool of plate glass, and had a picture book "
       "which had been bought for the value of half a kingdom. Oh, the children were very well off; but it was not "
       "always to remain so. Their father, who was king of the whole country, married a bad queen who did not love "
       "the poor children at all. On the very first day they could notice this. The queen said to the children,",
       96},
  }};
}

}  // namespace

std::span<const WorkloadItem> workload() {
  static const std::array<WorkloadItem, 12> items = make_workload();
  return items;
}

}  // namespace common
