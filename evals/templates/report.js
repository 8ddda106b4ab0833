// Reading needs none of this: it opens what a link points into, and everything for print.
(function () {
  "use strict";
  function reveal() {
    var target = location.hash && document.getElementById(location.hash.slice(1));
    for (var it = target; it; it = it.parentElement) if (it.tagName === "DETAILS") it.open = true;
    if (target) target.scrollIntoView();
  }
  var closed = [];
  addEventListener("hashchange", reveal);
  addEventListener("beforeprint", function () {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    closed.forEach(function (it) { it.open = true; });
  });
  addEventListener("afterprint", function () {
    closed.forEach(function (it) { it.open = false; });
  });
  reveal();
})();
